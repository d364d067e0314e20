package cudasim

// StructSize returns the size of the struct that a function fills.
func (s *Sim) StructSize(fn string) int { return s.structSize(fn) }
