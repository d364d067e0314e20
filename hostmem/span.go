package hostmem

// A Span is one registration of a buffer: CUDA takes a copy only if it lies
// within one.
type Span struct {
	Off, Len int // bytes
}

// Pieces calls do for each part of [off, off+n) that lies within one span, in
// order, until do returns an error: what copies by other means than a Buffer's
// own need. Offsets and lengths are in bytes.
func Pieces(spans []Span, off, n int, do func(off, n int) error) error {
	for _, s := range spans {
		from, to := max(off, s.Off), min(off+n, s.Off+s.Len)
		if from >= to {
			continue
		}
		if err := do(from, to-from); err != nil {
			return err
		}
	}
	return nil
}
