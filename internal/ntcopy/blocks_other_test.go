//go:build !(amd64 && gc && !purego && !noasm && !race && !msan && !asan)

package ntcopy

func variants() []string { return []string{"ntcopy"} }

func choose(string) {}
