//go:build gc && !purego && !noasm && !race && !msan && !asan

#include "textflag.h"

// All functions end in SFENCE. Non-temporal stores wait in write-combining
// buffers, and unlike all other stores of amd64 they are not ordered with the stores
// that follow: without the fence another thread or a device could see a flag that
// says the copy is complete before it sees the copy. A fence orders the stores of
// its own CPU, so it is here, where the runtime cannot move the goroutine to another
// thread between the stores and the fence. (When the kernel moves the thread to
// another CPU, the interrupt empties the buffers.)
//
// The functions are leaves without a frame: the runtime can unwind them at any
// instruction, so a fault in a load or a store can become a panic.

// func blocksAVX2(dst, src []byte)
TEXT ·blocksAVX2(SB), NOSPLIT, $0-48
	MOVQ dst_base+0(FP), DI
	MOVQ dst_len+8(FP), CX
	MOVQ src_base+24(FP), SI
	PCALIGN $32

loop:
	VMOVDQU  (SI), Y0
	VMOVDQU  32(SI), Y1
	VMOVDQU  64(SI), Y2
	VMOVDQU  96(SI), Y3
	VMOVNTDQ Y0, (DI)
	VMOVNTDQ Y1, 32(DI)
	VMOVNTDQ Y2, 64(DI)
	VMOVNTDQ Y3, 96(DI)
	ADDQ     $128, SI
	ADDQ     $128, DI
	SUBQ     $128, CX
	JHI      loop

	SFENCE
	VZEROUPPER // SSE code that runs next is slow while upper halves are in use
	RET

// func blocksSSE2(dst, src []byte)
TEXT ·blocksSSE2(SB), NOSPLIT, $0-48
	MOVQ dst_base+0(FP), DI
	MOVQ dst_len+8(FP), CX
	MOVQ src_base+24(FP), SI
	PCALIGN $32

loop:
	MOVOU  (SI), X0
	MOVOU  16(SI), X1
	MOVOU  32(SI), X2
	MOVOU  48(SI), X3
	MOVOU  64(SI), X4
	MOVOU  80(SI), X5
	MOVOU  96(SI), X6
	MOVOU  112(SI), X7
	MOVNTO X0, (DI)
	MOVNTO X1, 16(DI)
	MOVNTO X2, 32(DI)
	MOVNTO X3, 48(DI)
	MOVNTO X4, 64(DI)
	MOVNTO X5, 80(DI)
	MOVNTO X6, 96(DI)
	MOVNTO X7, 112(DI)
	ADDQ   $128, SI
	ADDQ   $128, DI
	SUBQ   $128, CX
	JHI    loop

	SFENCE
	RET

// func gatherAVX2(dst []byte, rows []unsafe.Pointer, size int)
//
// While a row is copied the next is fetched line by line: the CPU itself fetches ahead
// only where addresses follow one another, and no further than a page.
TEXT ·gatherAVX2(SB), NOSPLIT, $0-56
	MOVQ dst_base+0(FP), DI
	MOVQ rows_base+24(FP), R8
	MOVQ rows_len+32(FP), R9
	MOVQ size+48(FP), R10

row:
	MOVQ (R8), SI
	MOVQ SI, R11 // the last row fetches itself
	MOVQ R10, CX
	CMPQ R9, $1
	JEQ  lines
	MOVQ 8(R8), R11

lines:
	PREFETCHT0 (R11)
	VMOVDQU    (SI), Y0
	VMOVDQU    32(SI), Y1
	VMOVNTDQ   Y0, (DI)
	VMOVNTDQ   Y1, 32(DI)
	ADDQ       $64, R11
	ADDQ       $64, SI
	ADDQ       $64, DI
	SUBQ       $64, CX
	JHI        lines

	ADDQ $8, R8
	DECQ R9
	JNE  row

	SFENCE
	VZEROUPPER
	RET

// func prefetch(mem []byte)
TEXT ·prefetch(SB), NOSPLIT, $0-24
	MOVQ mem_base+0(FP), SI
	MOVQ mem_len+8(FP), CX

loop:
	PREFETCHT0 (SI)
	ADDQ       $64, SI
	SUBQ       $64, CX
	JHI        loop
	RET
