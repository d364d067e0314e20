#include "textflag.h"

// func core()
TEXT ·core(SB), NOSPLIT, $0-0
	PAUSE
	PAUSE
	PAUSE
	PAUSE
	RET
