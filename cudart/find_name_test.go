//go:build linux && !android && (amd64 || arm64)

package cudart

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestLibcudartVersion(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		isLibcudart bool
		version     Version
		soname      string
	}{
		"libcudart.so.13.0.96":          {true, 13000, "libcudart.so.13"},
		"libcudart.so.13":               {true, 13000, "libcudart.so.13"},
		"libcudart.so.12.4.127":         {true, 12040, "libcudart.so.12"},
		"libcudart.so.12.10.3":          {true, 12100, "libcudart.so.12"},
		"libcudart.so.12":               {true, 12000, "libcudart.so.12"},
		"libcudart.so.11.8.89":          {true, 11080, "libcudart.so.11.0"},
		"libcudart.so.11.0":             {true, 11000, "libcudart.so.11.0"},
		"libcudart.so.10.2.89":          {true, 10020, ""},
		"libcudart-d0da41ae.so.11.0":    {true, 11000, "libcudart.so.11.0"},
		"libcudart-8774224f.so.12.4.99": {true, 12040, "libcudart.so.12"},
		"libcudart.so":                  {true, 0, ""},
		"libcudart.so.":                 {false, 0, ""},
		"libcudart.so.12.":              {false, 0, ""},
		"libcudart.so.12.4.127.bak":     {false, 0, ""},
		"libcudart.so.12345":            {false, 0, ""},
		"libcudart_static.a":            {false, 0, ""},
		"libcudart-xyz.so.12":           {false, 0, ""},
		"xlibcudart.so.12":              {false, 0, ""},
		"libcuda.so.1":                  {false, 0, ""},
		"":                              {false, 0, ""},
	} {
		assert.Equal(t, want.isLibcudart, libcudartName(name), name)
		assert.Equal(t, want.version, libcudartVersion(name), name)
		assert.Equal(t, want.soname, libcudartSoname(libcudartVersion(name)), name)
	}
}

func FuzzLibcudartVersion(f *testing.F) {
	for _, seed := range []string{"libcudart.so", "libcudart.so.12.4.127", "libcudart-d0da41ae.so.11.0", "libcudart.so.999.99", "libcudart.so.-1", "libcudart.so.１２"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, name string) {
		v := libcudartVersion(name)
		assert.True(t, v >= 0 && v.Major() <= 999 && v.Minor() <= 99, "%q: %d", name, v)
		if v != 0 {
			assert.True(t, libcudartName(name), name)
			assert.Contains(t, name, "libcudart")
			assert.False(t, strings.ContainsAny(name, "/\n "), name)
		}
	})
}
