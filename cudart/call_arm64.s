//go:build linux && !android

#include "textflag.h"
#include "go_asm.h"

// callEntry calls a C function. runtime.cgocall runs it on the system stack, by
// the C calling convention, with the address of a cCall in R0. It touches no
// register that a C function has to preserve.
GLOBL ·callEntryABI0(SB), NOPTR|RODATA, $8
DATA ·callEntryABI0(SB)/8, $callEntry(SB)
TEXT callEntry(SB), NOSPLIT, $0
	SUB  $48, RSP
	MOVD R0, 24(RSP)
	MOVD R0, R9

	MOVD (cCall_args+64)(R9), R10 // arguments nine to eleven lie on the stack
	MOVD R10, 0(RSP)
	MOVD (cCall_args+72)(R9), R10
	MOVD R10, 8(RSP)
	MOVD (cCall_args+80)(R9), R10
	MOVD R10, 16(RSP)
	MOVD (cCall_args+0)(R9), R0
	MOVD (cCall_args+8)(R9), R1
	MOVD (cCall_args+16)(R9), R2
	MOVD (cCall_args+24)(R9), R3
	MOVD (cCall_args+32)(R9), R4
	MOVD (cCall_args+40)(R9), R5
	MOVD (cCall_args+48)(R9), R6
	MOVD (cCall_args+56)(R9), R7
	MOVD cCall_name(R9), R10
	MOVD R10, cCall_inside(R9)
	MOVD cCall_entry(R9), R10
	BL   (R10)

	MOVD 24(RSP), R9
	ADD  $48, RSP
	MOVD R0, cCall_result(R9)
	MOVD ZR, cCall_inside(R9)
	RET
