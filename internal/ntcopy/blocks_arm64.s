//go:build gc && !purego && !noasm && !race && !msan && !asan

#include "textflag.h"

// STNP stores a pair of registers and hints that the bytes will not be read soon.
// The assembler has no name for it.
//
// There is no barrier. To the memory model STNP is a plain store: all stores of
// arm64 are weakly ordered, and what publishes them, such as the release of an
// atomic, a mutex or a channel in Go, or the barrier in a driver before it starts a
// device, orders these too. The loads are plain LDP: LDNP, the non-temporal load, is
// weaker than other loads in that it may ignore an address dependency.
//
// The function is a leaf without a frame: the runtime can unwind it at any
// instruction, so a fault in a load or a store can become a panic.

// func blocks(dst, src []byte)
TEXT ·blocks(SB), NOSPLIT, $0-48
	MOVD dst_base+0(FP), R0
	MOVD dst_len+8(FP), R1
	MOVD src_base+24(FP), R2
	PCALIGN $32

loop:
	FLDPQ (R2), (F0, F1)
	FLDPQ 32(R2), (F2, F3)
	FLDPQ 64(R2), (F4, F5)
	FLDPQ 96(R2), (F6, F7)
	WORD  $0xac000400 // STNP Q0, Q1, [X0]
	WORD  $0xac010c02 // STNP Q2, Q3, [X0, #32]
	WORD  $0xac021404 // STNP Q4, Q5, [X0, #64]
	WORD  $0xac031c06 // STNP Q6, Q7, [X0, #96]
	ADD   $128, R2
	ADD   $128, R0
	SUBS  $128, R1
	BHI   loop
	RET

// func prefetch(mem []byte)
TEXT ·prefetch(SB), NOSPLIT, $0-24
	MOVD mem_base+0(FP), R0
	MOVD mem_len+8(FP), R1

loop:
	PRFM (R0), PLDL1KEEP
	ADD  $64, R0
	SUBS $64, R1
	BHI  loop
	RET
