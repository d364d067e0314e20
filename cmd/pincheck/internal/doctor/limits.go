package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/internal/units"
)

// shortOf are the codes of a process that is short of something that the kernel gives: which, the codes do
// not say.
var shortOf = []cudart.Code{0, cudart.ErrMemoryAllocation, cudart.ErrInitializationError, cudart.ErrNoDevice,
	cudart.ErrOperatingSystem, cudart.ErrDevicesUnavailable, cudart.ErrUnknown}

// failedOnGPU are findings of calls that fail for want of what limitChecks look at.
var failedOnGPU = []string{"pin_refused", "failed_call", "failed_round_trips", "skipped_round_trips", "host_memory_short", "gpu_full", "driver_crashes"}

// failsForWant are findings of what fails for want of what limitChecks look at, the start of a process too.
var failsForWant = append([]string{notStartedID}, failedOnGPU...)

// limitChecks find limits of the process that look like other errors. A limit alone is none: they ask for
// something that failed.
var limitChecks = []Check{
	{ID: "few_files", Explains: shortOf, Suppresses: failsForWant, Host: fewFiles},
	{ID: "few_tasks", Explains: shortOf, Suppresses: failsForWant, Host: fewTasks},
	{ID: "address_space_limit", Explains: shortOf, Suppresses: failsForWant, Host: addressSpace},
}

// failures lists the errors of starting a process and CUDA, of processes that crashed, and of calls on GPUs, that one of
// these codes or words is in.
func (f *Facts) failures(codes []cudart.Code, words ...string) (texts []string) {
	var all []string
	if f.called() && len(f.Devices) == 0 {
		all = append(all, f.Opening.Error)
	}
	all = slices.Concat(all, f.unstarted(), f.crashes(), f.DeviceErrors, benchErrors(f.Together))
	for i := range f.Devices {
		d := &f.Devices[i]
		all = slices.Concat(all, d.Errors, benchErrors(append(d.measurements(), d.Trials)...))
		if d.Verify != nil {
			for _, one := range d.Verify.Failures {
				all = append(all, one.Error)
			}
			for _, one := range d.Verify.Skipped {
				all = append(all, one.Reason)
			}
		}
	}
	for _, text := range all {
		named := slices.ContainsFunc(words, func(word string) bool { return strings.Contains(strings.ToLower(text), word) })
		if code := codeIn(text); named || code != 0 && slices.Contains(codes, code) {
			texts = append(texts, text)
		}
	}
	return texts
}

// CUDA opens about 30 files for one GPU, and more for each other one: with fewer than tooFewFiles it fails, and
// with fewer than minFiles it may.
const (
	tooFewFiles = 32
	minFiles    = 64
)

func fewFiles(f *Facts) []Finding {
	_, full := f.denied(emfile)
	limit, finite := f.Host.OpenFiles.Finite()
	failed := f.failures(shortOf, emfile)
	if len(full) == 0 && (!finite || limit > minFiles || len(failed) == 0) {
		return nil
	}
	out := Finding{Summary: "the process may open too few files", Evidence: slices.Concat(full, failed[:min(len(failed), 2)])}
	if finite {
		out.Summary = fmt.Sprintf("the process may open only %d files", limit)
		out.Evidence = append(out.Evidence, fmt.Sprintf("/proc/self/limits: Max open files is %d", limit))
		if limit > tooFewFiles && len(full) == 0 {
			out.Certainty = Likely
		}
	}
	return finding(out)
}

// fewTasksLeft is fewer threads than CUDA starts, and fewTasksOfUser are so few that one process can need them all: the
// threads of pincheck and of its child, and those of CUDA.
const (
	fewTasksLeft   = 8
	fewTasksOfUser = 64
)

// noTask are the words for a thread or process that the kernel refuses for want of a task.
var noTask = []string{"resource temporarily unavailable", "pthread_create"}

func fewTasks(f *Facts) []Finding {
	failed := f.failures(shortOf, noTask...)
	most, finite := f.Host.Cgroup.TasksMax.Finite()
	tasks, _ := f.Host.Cgroup.Tasks.Finite()
	if finite && most-tasks <= fewTasksLeft && len(failed) > 0 {
		return finding(Finding{
			because:  "group",
			Summary:  fmt.Sprintf("the control group has %d of at most %d tasks (processes and threads)", tasks, most),
			Evidence: append(failed[:min(len(failed), 2)], fmt.Sprintf("pids.current is %d, pids.max %d", tasks, most)),
		})
	}
	refused := f.failures(nil, noTask...)
	most, finite = f.Host.Processes.Finite()
	if finite && most <= fewTasksOfUser && len(refused) == 0 {
		refused = f.failures([]cudart.Code{cudart.ErrOperatingSystem}) // which is what CUDA says of a thread that it cannot start
	}
	if !finite || len(refused) == 0 {
		return nil
	}
	return finding(Finding{
		because:  "user",
		Summary:  fmt.Sprintf("the user may have only %d processes and threads (ulimit -u)", most),
		Evidence: append(refused[:min(len(refused), 2)], fmt.Sprintf("/proc/self/limits: Max processes is %d", most)),
	})
}

// minAddresses is less address space than CUDA reserves on large hosts: that of all memory of the host and its
// GPUs, several times.
const minAddresses = 1 << 40

// memoryLimits are those of a process that hold for what CUDA reserves: all addresses, or those that it may write.
var memoryLimits = []struct {
	because, name, what, flag string
	of                        func(*hostinfo.Host) hostinfo.Limit
}{
	{"addresses", "Max address space", "address space", "-v", func(h *hostinfo.Host) hostinfo.Limit { return h.AddressSpace }},
	{"data", "Max data size", "writable memory", "-d", func(h *hostinfo.Host) hostinfo.Limit { return h.DataSize }},
}

func addressSpace(f *Facts) []Finding {
	failed := f.failures([]cudart.Code{cudart.ErrMemoryAllocation, cudart.ErrOperatingSystem, cudart.ErrInitializationError, cudart.ErrUnknown}, "cannot allocate memory")
	if len(failed) == 0 {
		return nil
	}
	for _, m := range memoryLimits {
		limit, finite := m.of(f.Host).Finite()
		if !finite || limit >= minAddresses {
			continue
		}
		out := Finding{
			Summary:  fmt.Sprintf("the %s is limited to %s (ulimit %s)", m.what, units.Bytes(limit), m.flag),
			Evidence: append(failed[:min(len(failed), 2)], fmt.Sprintf("/proc/self/limits: %s is %d; the host has %s of memory", m.name, limit, units.Bytes(f.Host.Memory.Total))),
			because:  m.because,
		}
		if limit > 2*f.Host.Memory.Total {
			out.Against = []string{"it is more than twice the host's memory"}
		}
		return finding(out)
	}
	return nil
}
