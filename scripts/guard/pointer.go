package main

import "unsafe"

func pointer(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

func bytesAt(p unsafe.Pointer, n int) []byte { return unsafe.Slice((*byte)(p), n) }

func floats(b []byte) []float32 { return unsafe.Slice((*float32)(pointer(b)), len(b)/4) }
