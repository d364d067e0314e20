//go:build !unix

package linux

func systemMajor(any) int { return 0 }

func systemOwner(any) (Owner, bool) { return Owner{}, false }
