package procmem

import (
	"slices"
	"strings"
)

// A Framework is software that pins memory, as its libraries show.
type Framework struct {
	Name string `json:"name"`
	// Rounds says that by default it rounds sizes of pinned memory up to powers of two.
	Rounds bool `json:"rounds"`
	// Setting ends the rounding. Empty if none is known.
	Setting string `json:"setting,omitempty"`
	// Set says that the process was started with it already.
	Set bool `json:"set,omitempty"`
}

// PyTorchSetting ends the rounding of PyTorch's allocator of pinned memory
// (pytorch/pytorch #171662). Both limits are to be the same: with the second above the
// first, releases before the repair of #192722 returned blocks that were too small.
const PyTorchSetting = "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64 (from PyTorch 2.13 on; blocks above 64 MB are then as large as asked, and are unpinned when they are freed)"

// known are the frameworks and parts of the paths of their libraries. The order is from
// the specific, which use others, to the general.
type known struct {
	Framework
	parts []string
	set   func(*Process) bool // the process was started with the setting
}

var frameworks = []known{
	{Framework{Name: "DeepSpeed", Rounds: true, Setting: "DS_PIN_MEMORY_BACKEND=native and DS_PIN_MEMORY_REGISTER_DEVICE=1 (deepspeedai/DeepSpeed #8211 and #8283, of August 2026: posix_memalign, mlock and cudaHostRegister instead of PyTorch's allocator; without the second the memory is locked, but the GPU has no direct access)"},
		[]string{"/deepspeed/", "/async_io.so", "/async_io/", "deepspeed_pin_tensor", "/pin_memory.so", "/cpu_adam.so"},
		func(p *Process) bool { return p.Environ["DS_PIN_MEMORY_BACKEND"] == "native" }},
	{Framework{Name: "vLLM"}, []string{"/vllm/"}, nil},
	{Framework{Name: "SGLang"}, []string{"/sgl_kernel/", "/sglang/"}, nil},
	{Framework{Name: "PyTorch", Rounds: true, Setting: PyTorchSetting}, []string{"/libtorch.so", "/libtorch_cpu.so", "/libtorch_cuda.so", "/libc10_cuda.so"},
		func(p *Process) bool { return strings.Contains(p.settings(), "pinned_max_round_threshold_mb:") }},
	{Framework{Name: "CuPy", Rounds: true, Setting: "cupy.cuda.set_pinned_memory_allocator(None), which allocates without its pool (cupy/cupy #7742)"}, []string{"/cupy/", "/cupy_backends/"}, nil},
	{Framework{Name: "TensorFlow"}, []string{"/libtensorflow", "/_pywrap_tensorflow"}, nil},
	{Framework{Name: "JAX"}, []string{"/jaxlib/", "/xla_extension.so", "/jax_cuda"}, nil},
	{Framework{Name: "ONNX Runtime"}, []string{"/libonnxruntime"}, nil},
	{Framework{Name: "llama.cpp"}, []string{"/libggml", "/libllama.so"}, nil},
}

// Known returns what is known of a framework: of one that is not, its name.
func Known(name string) Framework {
	for _, k := range frameworks {
		if k.Name == name {
			return k.Framework
		}
	}
	return Framework{Name: name}
}

func (k known) maps(path string) bool {
	return slices.ContainsFunc(k.parts, func(part string) bool { return strings.Contains(path, part) })
}

func rank(f Framework) int {
	return slices.IndexFunc(frameworks, func(k known) bool { return k.Name == f.Name })
}
