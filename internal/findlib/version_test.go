package findlib

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// Descriptions as packages that load these libraries give them.
var (
	libcudart = Library{
		Name:      "libcudart",
		Sonames:   []string{"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"},
		Wheel:     "nvidia_cuda_runtime",
		WheelDirs: []string{"nvidia/cu*", "torch"},
		Toolkit:   true,
	}
	libcublas = Library{
		Name:      "libcublas",
		Sonames:   []string{"libcublas.so.13", "libcublas.so.12"},
		Wheel:     "nvidia_cublas",
		WheelDirs: []string{"nvidia/cu*"},
		Toolkit:   true,
	}
	nvml = Library{
		Name:    "libnvidia-ml",
		Sonames: []string{"libnvidia-ml.so.1"},
		Driver:  true,
	}
)

func TestVersionInFileNames(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		lib     Library
		matches bool
		version Version
	}{
		"libcudart.so.13.0.96":          {libcudart, true, Version{13, 0}},
		"libcudart.so.13":               {libcudart, true, Version{13, 0}},
		"libcudart.so.12.4.127":         {libcudart, true, Version{12, 4}},
		"libcudart.so.12.10.3":          {libcudart, true, Version{12, 10}},
		"libcudart.so.12":               {libcudart, true, Version{12, 0}},
		"libcudart.so.11.8.89":          {libcudart, true, Version{11, 8}},
		"libcudart.so.11.0":             {libcudart, true, Version{11, 0}},
		"libcudart.so.10.2.89":          {libcudart, true, Version{10, 2}},
		"libcudart-d0da41ae.so.11.0":    {libcudart, true, Version{11, 0}},
		"libcudart-8774224f.so.12.4.99": {libcudart, true, Version{12, 4}},
		"libcudart.so":                  {libcudart, true, Version{}},
		"libcudart.so.":                 {libcudart, false, Version{}},
		"libcudart.so.12.":              {libcudart, false, Version{}},
		"libcudart.so.12.4.127.bak":     {libcudart, false, Version{}},
		"libcudart.so.12345":            {libcudart, false, Version{}},
		"libcudart_static.a":            {libcudart, false, Version{}},
		"libcudart-xyz.so.12":           {libcudart, false, Version{}},
		"libcudartXso.12":               {libcudart, false, Version{}},
		"xlibcudart.so.12":              {libcudart, false, Version{}},
		"libcuda.so.1":                  {libcudart, false, Version{}},
		"":                              {libcudart, false, Version{}},
		"libcublas.so.12.4.5.8":         {libcublas, true, Version{12, 4}},
		"libcublasLt.so.12.4.5.8":       {libcublas, false, Version{}},
		"libnvidia-ml.so.580.159.04":    {nvml, true, Version{580, 159}},
		"libnvidia-ml.so.1":             {nvml, true, Version{1, 0}},
	} {
		s := Host{}.search(want.lib)
		assert.Equal(t, want.matches, s.file.MatchString(name), name)
		assert.Equal(t, want.version, s.versionInName("/some/directory/"+name), name)
	}
}

func FuzzVersionInFileNames(f *testing.F) {
	for _, seed := range []string{"libcudart.so", "libcudart.so.12.4.127", "libcudart-d0da41ae.so.11.0", "libcudart.so.999.99", "libcudart.so.-1", "libcudart.so.１２"} {
		f.Add(seed)
	}
	s := Host{}.search(libcudart)
	f.Fuzz(func(t *testing.T, name string) {
		v := versionIn(s.file, name)
		assert.True(t, v.Major >= 0 && v.Major <= 999 && v.Minor >= 0 && v.Minor <= 999, "%q: %d", name, v)
		if v != (Version{}) {
			assert.True(t, s.file.MatchString(name), name)
			assert.Contains(t, name, "libcudart")
			assert.False(t, strings.ContainsAny(name, "/\n "), name)
		}
	})
}
