package main

import (
	"runtime"
	"runtime/debug"

	"github.com/gopinned/pinned/cmd/pincheck/internal/report"
)

// version may be set when linking: -ldflags "-X main.version=v1.2.3". Otherwise it is
// the module's version, which go install sets.
var version string

func tool() report.Tool {
	t := report.Tool{Name: "pincheck", Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if ok {
		if t.Version == "" {
			t.Version = info.Main.Version
		}
		t.Revision = revision(info.Settings)
	}
	if t.Version == "" || t.Version == "(devel)" {
		t.Version = "devel"
	}
	return t
}

// revision returns the revision of the source, if the build recorded it.
func revision(settings []debug.BuildSetting) string {
	var rev, dirty string
	for _, s := range settings {
		switch s.Key {
		case "vcs.revision":
			rev = s.Value
		case "vcs.modified":
			if s.Value == "true" {
				dirty = "+dirty"
			}
		}
	}
	if rev == "" {
		return ""
	}
	return rev[:min(12, len(rev))] + dirty
}
