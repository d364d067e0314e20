//go:build !unix

package hostinfo

func systemOwner(any) (Owner, bool) { return Owner{}, false }
