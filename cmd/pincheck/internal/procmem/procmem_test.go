package procmem

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// entry is a mapping in the form of smaps.
func entry(start, size int, permissions, name string, rss int, more ...string) string {
	inode := 0
	if strings.HasPrefix(name, "/") {
		inode = 1063
	}
	return fmt.Sprintf("%x-%x %s 00000000 00:01 %d                     %s\nSize:           %8d kB\nKernelPageSize:        4 kB\nRss:            %8d kB\n%sVmFlags: rd wr sh mr mw me ms sd\n",
		start, start+size, permissions, inode, name, size>>10, rss>>10, strings.Join(more, ""))
}

const status = "Name:\tpython3\nState:\tS (sleeping)\nPPid:\t1\nVmLck:\t       0 kB\nVmPin:\t       0 kB\n"

func process(smaps, environ string) fstest.MapFS {
	fsys := fstest.MapFS{
		"proc/self/status": {Data: []byte(status)},
		"proc/7/status":    {Data: []byte(status)},
		"proc/7/smaps":     {Data: []byte(smaps)},
	}
	if environ != "" {
		fsys["proc/7/environ"] = &fstest.MapFile{Data: []byte(environ)}
	}
	return fsys
}

const (
	mib  = 1 << 20
	base = 0x7f0000000000
)

var (
	torch  = entry(0x7e0000000000, 4*mib, "r-xp", "/opt/venv/lib/python3.12/site-packages/torch/lib/libtorch_cuda.so", mib)
	driver = entry(0x7e1000000000, 4*mib, "r-xp", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", mib) +
		entry(0x7e2000000000, 2*mib, "rw-s", "/dev/nvidiactl", 0)
	heap = entry(0x560000000000, 64*mib, "rw-p", "[heap]", 60*mib)
)

// pinned is memory as cudaHostAlloc maps it.
func pinned(sizes ...int) (text string) {
	at := base
	for _, n := range sizes {
		text += entry(at, n, "rw-s", "/dev/zero (deleted)", n)
		at += n + mib
	}
	return text
}

func TestPyTorchRounds(t *testing.T) {
	t.Parallel()
	p, err := Read(process(heap+driver+torch+pinned(2*mib, 64*mib, 2048*mib), "HOME=/root\x00SECRET=1\x00PYTORCH_ALLOC_CONF=expandable_segments:True\x00"), 7)
	require.NoError(t, err)
	assert.Equal(t, "python3", p.Name)
	assert.True(t, p.Driver)
	require.Len(t, p.Frameworks, 1)
	assert.Equal(t, "PyTorch", p.Frameworks[0].Name)
	assert.Contains(t, p.Frameworks[0].Setting, "pinned_max_round_threshold_mb")
	assert.False(t, p.Frameworks[0].Set)
	assert.Equal(t, map[string]string{"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, p.Environ, "nothing else is kept")
	assert.Equal(t, 2114*mib, p.HostAllocated)
	assert.Equal(t, (60+1+1+2114)*mib, p.Resident)
	assert.Equal(t, []Block{{2048 * mib, 2048 * mib, true}, {64 * mib, 64 * mib, true}}, p.Blocks, "2 MiB are the driver's own unit")
	smallest, limit := p.Pinned()
	assert.Equal(t, 2114*mib, smallest)
	assert.Equal(t, 2114*mib, limit, "the heap of malloc is not what is registered")
	bytes, blocks, likely := p.Rounded()
	assert.Equal(t, 2112*mib, bytes)
	assert.Equal(t, 2, blocks)
	assert.True(t, likely)
}

func TestExactSizesAreNotRounded(t *testing.T) {
	t.Parallel()
	p, err := Read(process(driver+torch+pinned(64*mib, 1500*mib, 700*mib), ""), 7)
	require.NoError(t, err)
	assert.Nil(t, p.Environ)
	bytes, blocks, likely := p.Rounded()
	assert.Equal(t, 64*mib, bytes)
	assert.Equal(t, 1, blocks)
	assert.False(t, likely)
}

// Programs of their own ask for powers of two, too.
func TestFewPowersOfTwoWithoutAFrameworkProveNothing(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]bool{1: false, 3: false, 4: true} {
		sizes := make([]int, n)
		for i := range sizes {
			sizes[i] = 64 * mib
		}
		p, err := Read(process(driver+pinned(sizes...), ""), 7)
		require.NoError(t, err)
		_, blocks, likely := p.Rounded()
		assert.Equal(t, n, blocks)
		assert.Equal(t, want, likely, n)
	}
	none, err := Read(process(driver, ""), 7)
	require.NoError(t, err)
	_, _, likely := none.Rounded()
	assert.False(t, likely)
}

// The mappings of a real process, those of 2 MiB and more: PyTorch 2.11 with 1 GiB + 1
// byte pinned, beside an H200 (driver 580, 2026-11-22).
func TestARealProcess(t *testing.T) {
	t.Parallel()
	smaps, err := os.ReadFile("testdata/smaps-torch-2.11-pinned-1gib-and-1.txt")
	require.NoError(t, err)
	p, err := Read(process(string(smaps), ""), 7)
	require.NoError(t, err)
	assert.True(t, p.Driver)
	assert.Equal(t, 2048*mib, p.Blocks[0].Size)
	_, _, likely := p.Rounded()
	assert.True(t, likely)
	smallest, limit := p.Pinned()
	assert.Equal(t, 2056*mib, smallest, "beside small ones of the driver")
	assert.Less(t, limit, 2400*mib)
}

// Shared memory of a process without the CUDA driver, as a database has, is not pinned.
func TestSharedMemoryWithoutTheDriver(t *testing.T) {
	t.Parallel()
	p, err := Read(process(heap+pinned(1024*mib)+entry(0x7d0000000000, 64*mib, "rw-p", "", 64*mib), ""), 7)
	require.NoError(t, err)
	assert.False(t, p.Driver)
	assert.Zero(t, p.HostAllocated)
	assert.Empty(t, p.Blocks)
	smallest, limit := p.Pinned()
	assert.Zero(t, smallest)
	assert.Zero(t, limit)
	assert.Equal(t, (1024+64+60)*mib, p.Resident)
}

func TestOtherWaysOfPinning(t *testing.T) {
	t.Parallel()
	fsys := process(driver+
		entry(base, 100*mib, "rw-p", "[anon:pinned]", 100*mib)+
		entry(base+200*mib, 300*mib, "rw-p", "", 250*mib)+
		entry(base+600*mib, mib/2, "rw-p", "", mib/2)+
		entry(base+700*mib, 64*mib, "rw-p", "/anon_hugepage (deleted)", 0, "Private_Hugetlb:   65536 kB\n"), "")
	fsys["proc/7/status"] = &fstest.MapFile{Data: []byte("Name:\tx\nState:\tR (running)\nVmLck:\t    2048 kB\nVmPin:\t    4096 kB\n")}
	p, err := Read(fsys, 7)
	require.NoError(t, err)
	assert.Equal(t, 100*mib, p.Buffers)
	assert.Equal(t, 250*mib, p.Private)
	assert.Equal(t, 64*mib, p.Hugetlb)
	assert.Equal(t, 2*mib, p.Locked)
	assert.Equal(t, 4*mib, p.PinnedByKey)
	smallest, limit := p.Pinned()
	assert.Equal(t, 104*mib, smallest)
	assert.Equal(t, 354*mib, limit)
}

// With this setting PyTorch registers what malloc returns, which has a page more.
func TestPyTorchThatRegisters(t *testing.T) {
	t.Parallel()
	smaps := driver + torch + entry(base, 1024*mib+4096, "rw-p", "", 1024*mib+4096) + entry(base+2048*mib, 300*mib, "rw-p", "", 300*mib)
	p, err := Read(process(smaps, "PYTORCH_CUDA_ALLOC_CONF=pinned_use_cuda_host_register:True,pinned_num_register_threads:8\x00"), 7)
	require.NoError(t, err)
	assert.Equal(t, []Block{{1024 * mib, 1024*mib + 4096, true}}, p.Blocks)
	_, _, likely := p.Rounded()
	assert.True(t, likely)

	p, err = Read(process(smaps, "HOME=/\x00"), 7)
	require.NoError(t, err)
	assert.Empty(t, p.Blocks, "without the setting it may be any array")
}

func TestFrameworks(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		libraries []string
		want      []string
	}{
		{[]string{"/x/torch/lib/libtorch_cpu.so", "/root/.cache/torch_extensions/py312_cu130/async_io/async_io.so"}, []string{"DeepSpeed", "PyTorch"}},
		{[]string{"/x/site-packages/torch/lib/libtorch_cuda.so", "/x/site-packages/vllm/_C.abi3.so"}, []string{"vLLM", "PyTorch"}},
		{[]string{"/x/site-packages/tensorflow/libtensorflow_framework.so.2"}, []string{"TensorFlow"}},
		{[]string{"/x/site-packages/jaxlib/libjax_common.so"}, []string{"JAX"}},
		{[]string{"/x/site-packages/cupy_backends/cuda/api/runtime.so (deleted)"}, []string{"CuPy"}},
		{[]string{"/opt/llama/libggml-cuda.so"}, []string{"llama.cpp"}},
		{[]string{"/data/torch/notes.txt", "/usr/lib/libc.so.6"}, nil},
	} {
		text := ""
		for i, name := range tt.libraries {
			text += entry(base+i*8*mib, mib, "r-xp", name, 0)
		}
		p, err := Read(process(text, ""), 7)
		require.NoError(t, err)
		var names []string
		for _, f := range p.Frameworks {
			names = append(names, f.Name)
			if f.Rounds {
				assert.NotEmpty(t, f.Setting, f.Name)
			}
		}
		assert.Equal(t, tt.want, names)
	}
}

// faulty is a file system on which files fail, or after which other files are there.
type faulty struct {
	fstest.MapFS
	errs  map[string]error
	after func(name string)
}

func (f faulty) Open(name string) (fs.File, error) {
	if err := f.errs[name]; err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	file, err := f.MapFS.Open(name)
	if f.after != nil {
		f.after(name)
	}
	return file, err
}

func (f faulty) ReadFile(name string) ([]byte, error) {
	if err := f.errs[name]; err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return f.MapFS.ReadFile(name)
}

func TestErrors(t *testing.T) {
	t.Parallel()
	zombie := process("", "")
	zombie["proc/7/status"] = &fstest.MapFile{Data: []byte("Name:\tx\nState:\tZ (zombie)\nPPid:\t12\n")}
	damaged := process("nonsense\n", "")
	refused := faulty{MapFS: process(driver, ""), errs: map[string]error{"proc/7/smaps": fs.ErrPermission}}
	gone := faulty{MapFS: process(driver, "")}
	gone.after = func(name string) {
		if name == "proc/7/smaps" {
			delete(gone.MapFS, "proc/7/status")
		}
	}
	hidden := faulty{MapFS: process(driver, ""), errs: map[string]error{"proc/7/status": fs.ErrPermission}}
	for _, tt := range []struct {
		name string
		fsys fs.FS
		pid  int
		want string
		is   error
	}{
		{"zero", process("", ""), 0, "memory of process 0: process ids are positive", nil},
		{"negative", process("", ""), -3, "memory of process -3: process ids are positive", nil},
		{"none", process("", ""), 8, "memory of process 8: there is no such process", fs.ErrNotExist},
		{"no /proc", fstest.MapFS{}, 8, "this system has no /proc", errors.ErrUnsupported},
		{"zombie", zombie, 7, "its parent 12 has not asked for its exit status yet", fs.ErrNotExist},
		{"kernel thread", process("", ""), 7, "it is a thread of the kernel", errors.ErrUnsupported},
		{"damaged", damaged, 7, `/proc/7/smaps:1: "nonsense" is not`, nil},
		{"refused", refused, 7, "run as the user of the process, or as root", fs.ErrPermission},
		{"hidden", hidden, 7, "/proc/7/status", fs.ErrPermission},
		{"ends meanwhile", gone, 7, "it ended while it was read", fs.ErrNotExist},
	} {
		p, err := Read(tt.fsys, tt.pid)
		require.ErrorContains(t, err, tt.want, tt.name)
		assert.Nil(t, p)
		if tt.is != nil {
			assert.ErrorIs(t, err, tt.is, tt.name)
		}
	}
}

func TestThisProcess(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		_, err := Read(os.DirFS("/"), os.Getpid())
		assert.Error(t, err)
		return
	}
	p, err := Read(os.DirFS("/"), os.Getpid())
	require.NoError(t, err)
	assert.Greater(t, p.Resident, mib)
	assert.False(t, p.Driver)
	assert.NotEmpty(t, p.Name)
}

func FuzzRead(f *testing.F) {
	f.Add(driver+torch+pinned(4*mib), "PYTORCH_ALLOC_CONF=x\x00", status)
	f.Add("1000-2000 rw-p 0 00:00 0\n", "=\x00\x00a", "State:\tZ\n")
	f.Fuzz(func(t *testing.T, smaps, environ, status string) {
		fsys := process(smaps, environ)
		fsys["proc/7/status"] = &fstest.MapFile{Data: []byte(status)}
		p, err := Read(fsys, 7)
		if err != nil {
			return
		}
		if smallest, limit := p.Pinned(); smallest > limit {
			t.Errorf("pinned %d to %d", smallest, limit)
		}
		p.Rounded()
	})
}

func TestSettingsThatAreThere(t *testing.T) {
	t.Parallel()
	deepspeed := entry(0x7d0000000000, mib, "r-xp", "/x/site-packages/deepspeed/ops/async_io.so", 0)
	for environ, want := range map[string][2]bool{
		"": {false, false},
		"PYTORCH_CUDA_ALLOC_CONF=pinned_max_round_threshold_mb:64\x00":                        {false, true},
		"PYTORCH_ALLOC_CONF=x:1\x00PYTORCH_CUDA_ALLOC_CONF=pinned_max_round_threshold_mb\x00": {false, false},
		"DS_PIN_MEMORY_BACKEND=native\x00":                                                    {true, false},
		"DS_PIN_MEMORY_BACKEND=torch\x00":                                                     {false, false},
	} {
		p, err := Read(process(deepspeed+torch, environ), 7)
		require.NoError(t, err)
		require.Len(t, p.Frameworks, 2)
		assert.Equal(t, want, [2]bool{p.Frameworks[0].Set, p.Frameworks[1].Set}, "%q", environ)
	}
}
