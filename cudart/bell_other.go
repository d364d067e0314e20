//go:build !(linux && !android && (amd64 || arm64))

package cudart

import "time"

type bell struct{}

func newBell() (*bell, error) { return nil, ErrUnsupported }

func (b *bell) precise()           {}
func (b *bell) wait(time.Duration) {}
func (b *bell) ring()              {}
func (b *bell) close()             {}
