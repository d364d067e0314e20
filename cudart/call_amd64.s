//go:build linux && !android

#include "textflag.h"
#include "go_asm.h"

// callEntry calls a C function. runtime.cgocall runs it on the system stack, by
// the C calling convention, with the address of a cCall in DI. It touches no
// register that a C function has to preserve.
GLOBL ·callEntryABI0(SB), NOPTR|RODATA, $8
DATA ·callEntryABI0(SB)/8, $callEntry(SB)
TEXT callEntry(SB), NOSPLIT, $48
	MOVQ DI, 40(SP)
	MOVQ DI, R11

	MOVQ (cCall_args+48)(R11), R10 // arguments seven to eleven lie on the stack
	MOVQ R10, 0(SP)
	MOVQ (cCall_args+56)(R11), R10
	MOVQ R10, 8(SP)
	MOVQ (cCall_args+64)(R11), R10
	MOVQ R10, 16(SP)
	MOVQ (cCall_args+72)(R11), R10
	MOVQ R10, 24(SP)
	MOVQ (cCall_args+80)(R11), R10
	MOVQ R10, 32(SP)
	MOVQ (cCall_args+0)(R11), DI
	MOVQ (cCall_args+8)(R11), SI
	MOVQ (cCall_args+16)(R11), DX
	MOVQ (cCall_args+24)(R11), CX
	MOVQ (cCall_args+32)(R11), R8
	MOVQ (cCall_args+40)(R11), R9
	MOVQ cCall_name(R11), R10
	MOVQ R10, cCall_inside(R11)
	MOVQ cCall_entry(R11), R10
	XORL AX, AX
	CALL R10

	MOVQ 40(SP), R11
	MOVQ AX, cCall_result(R11)
	MOVQ $0, cCall_inside(R11)
	RET
