#include "textflag.h"

// func Core()
TEXT ·Core(SB), NOSPLIT, $0-0
	PAUSE
	PAUSE
	PAUSE
	PAUSE
	RET
