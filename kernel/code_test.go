package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
)

// Code that CUDA would take and fail on later, or read beyond, is refused, and the error says
// what it is. What compilers make is taken.
func TestOtherAndTruncatedCodeIsRefused(t *testing.T) {
	t.Parallel()
	fatbin, err := os.ReadFile("testdata/user.fatbin") // a cubin and compressed PTX, from CUDA 11.8
	require.NoError(t, err)
	ptx, err := os.ReadFile("testdata/user.ptx")
	require.NoError(t, err)
	const entry = 16 + 64 // bytes before the cubin
	cubin := fatbin[entry:][:binary.LittleEndian.Uint64(fatbin[24:])]
	for name, code := range map[string][]byte{
		"a fat binary": fatbin, "a fat binary and more": append(bytes.Clone(fatbin), "more"...), "a cubin": cubin, "PTX": ptx,
		"PTX with its zero byte": append(bytes.Clone(ptx), 0),
		"PTX in one line":        []byte(".version 7.0 .target sm_75 .address_size 64"),
		"PTX after comments":     []byte("/* .version\n9 */ // x\n.version 7.0\n// y\n.target sm_75\n"),
	} {
		_, err := checkCode(code)
		assert.NoError(t, err, name)
	}
	changed := func(code []byte, off int, b ...byte) []byte {
		code = bytes.Clone(code)
		copy(code[off:], b)
		return code
	}
	ones := bytes.Repeat([]byte{0xFF}, 8)
	for name, tt := range map[string]struct {
		code []byte
		want string
	}{
		"nothing":                 {nil, "the code is empty"},
		"one byte":                {[]byte{7}, `1 bytes that begin with "\a" are neither PTX, nor a cubin, nor a fat binary`},
		"zero bytes":              {make([]byte, 100), "100 bytes that begin"},
		"64 MiB of x":             {bytes.Repeat([]byte("x"), 64<<20), `67108864 bytes that begin with "xxxxxxxxxxxxxxxx"`},
		"PTX without a target":    {[]byte(".version 7.0\n"), "neither PTX"},
		"PTX somewhere":           {append([]byte("x"), ptx...), "neither PTX"},
		"CUDA C":                  {[]byte("__global__ void f() {}"), "neither PTX"},
		"PTX with a zero byte":    {append(append(bytes.Clone(ptx), 0), ptx...), "the PTX has a zero byte at offset"},
		"the fat binary's magic":  {[]byte(fatbinMagic), "the fat binary's header has 16 bytes or more at offset 0, and there are 4"},
		"a fat binary of 4 GiB":   {changed(fatbin[:16], 8, 0, 0, 0, 0, 1, 0, 0, 0), "the fat binary has 4294967296 bytes or more at offset 16, and there are 16"},
		"a fat binary of all":     {changed(fatbin, 8, ones...), "the fat binary has 18446744073709551615"},
		"a fat binary of nothing": {changed(fatbin, 8, make([]byte, 8)...), "its entries 0: it is damaged"},
		"half a fat binary":       {fatbin[:len(fatbin)/2], "a part is missing"},
		"an entry's header":       {changed(fatbin, 20, ones[:4]...), "code in the fat binary"},
		"an entry's size":         {changed(fatbin, 24, ones...), "code in the fat binary has 18446744073709551615"},
		"the magic of ELF":        {cubin[:4], "the cubin's header has 64 bytes"},
		"a program for this host": {changed(cubin, 18, byte(elf.EM_X86_64), 0), "for EM_X86_64 is not a cubin"},
		"of 32 bits":              {changed(cubin, 4, 1), "an ELF file of ELFCLASS32"},
		"half a cubin":            {cubin[:len(cubin)/2], "the cubin's table of sections has"},
		"a cubin less its end":    {cubin[:len(cubin)-1], "the cubin's table of segments has"},
		"a table far away":        {changed(cubin, 40, ones...), "the cubin's table of sections has 1280 bytes or more at offset 18446744073709551615"},
		"sizes of headers":        {changed(cubin, 58, 1, 0), "section headers have 1 bytes"},
		"a section far away":      {changed(cubin, int(binary.LittleEndian.Uint64(cubin[40:]))+64+24, ones...), "the cubin's section 1 has"},
		"a segment far away":      {changed(cubin, int(binary.LittleEndian.Uint64(cubin[32:]))+56+32, ones...), "the cubin's segment 1 has"},
	} {
		_, err := checkCode(tt.code)
		assert.ErrorIs(t, err, cudart.ErrInvalidKernelImage, name)
		assert.ErrorContains(t, err, tt.want, name)
	}
	for n := range len(fatbin) { // wherever it ends
		_, err := checkCode(fatbin[:n])
		assert.Error(t, err)
		if n < len(cubin) {
			_, err = checkCode(cubin[:n])
			assert.Error(t, err)
		}
	}
}
