package doctor

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
	"github.com/gopinned/pinned/cmd/pincheck/internal/nvml"
)

// What happens to the GPUs of made-up hosts.
const (
	isMeasured      = "measured"
	lostItsNode     = "lost its node"
	withoutADriver  = "no driver"
	tooOldForDriver = "too old"
	fellOff         = "fell off the bus"
	nvmlLost        = "lost, as NVML shows"
	forAGuest       = "vfio"
	overridden      = "driver_override"
	emptyMIG        = "MIG without an instance"
	besideInstance  = "beside a MIG instance"
	hiddenByCUDA    = "hidden by CUDA_VISIBLE_DEVICES"
	deniedByGroup   = "denied by the control group"
	byParameter     = "excluded by the module's parameter"
	notAssigned     = "not in NVreg_AssignGpus"
	leftOutByOption = "left out by --device"
	guestFunction   = "SR-IOV"
)

var (
	broken    = []string{lostItsNode, withoutADriver, tooOldForDriver, fellOff, nvmlLost}
	chosenOut = []string{forAGuest, overridden, emptyMIG, besideInstance, hiddenByCUDA, deniedByGroup, byParameter, notAssigned, leftOutByOption, guestFunction}
)

// A made host is one with GPUs of these states.
func madeHost(t *testing.T, h hostinfo.Host, states []string, boards, library bool) *Facts {
	t.Helper()
	f := well(t)
	pattern := h.GPUs[0]
	h.GPUs, h.NVIDIA.Boards, h.Env = nil, nil, map[string]string{}
	h.NVIDIA.AssignedGPUs = nil
	h.NVIDIA.Nodes = slices.DeleteFunc(slices.Clone(h.NVIDIA.Nodes), func(n hostinfo.Node) bool { return hostinfo.IsGPUNode(n.Path) })
	f.Host, f.Devices = &h, []Device{}
	report := &nvml.Report{}
	var shown []string // by CUDA, with those that its variable hides
	instance := slices.Contains(states, besideInstance)
	for i, state := range states {
		g := pattern
		g.Address, g.Driver = fmt.Sprintf("0000:%02x:00.0", i+1), "nvidia"
		n := hostinfo.Node{Path: fmt.Sprintf("/dev/nvidia%d", i)}
		d := fine(55.4, 55.3)
		d.Ordinal, d.PCIBusID, d.UUID = len(f.Devices), g.Address, fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)
		known := nvml.GPU{Index: len(report.GPUs), PCIBusID: "0000" + g.Address, MIG: number(false)}
		node, listed, inNVML := true, true, true
		switch state {
		case isMeasured:
			if instance {
				d.UUID = strings.Replace(d.UUID, "GPU", "MIG", 1)
				known.MIG, known.MIGInstances = number(true), number(1)
			}
			f.Devices = append(f.Devices, d)
			shown = append(shown, fmt.Sprint(len(shown)))
		case lostItsNode:
			node, inNVML = false, false
		case withoutADriver:
			g.Driver, node, listed, inNVML = "", false, false, false
		case tooOldForDriver:
			g.Driver, g.DeviceID, node, listed, inNVML = "", "0x128b", false, false, false
		case fellOff:
			g.OffBus, inNVML = true, false
		case nvmlLost:
			known.Error = "nvmlDeviceGetHandleByIndex_v2: the GPU is lost: it has fallen off the bus or is otherwise inaccessible (15)"
		case forAGuest:
			g.Driver, node, listed, inNVML = "vfio-pci", false, false, false
		case overridden:
			g.Driver, g.Override, node, listed, inNVML = "", "vfio-pci", false, false, false
		case emptyMIG:
			known.MIG, known.MIGInstances = number(true), number(0)
		case hiddenByCUDA:
		case deniedByGroup:
			n.OpenError, inNVML = "operation not permitted", false
		case notAssigned:
			g.Driver, node, listed, inNVML = "", false, false, false
		case guestFunction:
			g.VirtualFunction, node, listed, inNVML = true, false, false, false
		case leftOutByOption:
			f.NotChosen = append(f.NotChosen, g.Address)
			shown = append(shown, fmt.Sprint(len(shown)))
		case byParameter:
			inNVML = false
		}
		if state != notAssigned && slices.Contains(states, notAssigned) && state != withoutADriver {
			h.NVIDIA.AssignedGPUs = append(h.NVIDIA.AssignedGPUs, g.Address)
		}
		h.GPUs = append(h.GPUs, g)
		if node {
			h.NVIDIA.Nodes = append(h.NVIDIA.Nodes, n)
		}
		if listed && boards {
			h.NVIDIA.Boards = append(h.NVIDIA.Boards, hostinfo.Board{Address: g.Address, UUID: fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i), Minor: fmt.Sprint(i), Excluded: state == byParameter})
		}
		if inNVML {
			report.GPUs = append(report.GPUs, known)
		}
	}
	report.Count = len(report.GPUs)
	if library {
		f.NVML = report
	}
	if slices.Contains(states, hiddenByCUDA) {
		h.Env[visibleDevices] = strings.Join(shown, ",")
	}
	count := len(shown)
	f.CUDADevices = &count
	return relink(f)
}

// Each GPU is examined, in a finding, or in a note about who left it out. A host with a broken GPU is not Healthy.
func TestEachGPUOnTheBusIsAccountedFor(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	healthy, sick := 0, 0
	pattern := *host(t, "h200-vm")
	pattern.Memory.Total, pattern.Memory.Available = 0, 0 // what a host of these GPUs needs of memory is another matter
	hosts := 600
	if testing.Short() {
		hosts = 75
	}
	if os.Getenv("PINNED_SOAK") != "" {
		hosts = 6000
	}
	for range hosts {
		boards := r.IntN(2) == 0
		states := []string{isMeasured}
		kinds := slices.Concat([]string{isMeasured, isMeasured}, chosenOut)
		if r.IntN(2) == 0 {
			kinds = append(kinds, broken...)
		}
		if r.IntN(2) == 0 {
			kinds = slices.DeleteFunc(kinds, func(s string) bool { return s == hiddenByCUDA || s == besideInstance })
		}
		for n := r.IntN(16); n > 0; n-- {
			states = append(states, kinds[r.IntN(len(kinds))])
		}
		if slices.Contains(states, besideInstance) { // CUDA shows a process no more than this instance
			states = slices.DeleteFunc(states, func(s string) bool { return s == leftOutByOption || s == hiddenByCUDA })
			for i := 1; i < len(states); i++ {
				if states[i] == isMeasured {
					states[i] = besideInstance
				}
			}
		}
		if slices.Contains(states, notAssigned) { // then these are not known apart
			states = slices.DeleteFunc(states, func(s string) bool { return s == withoutADriver || s == tooOldForDriver })
		}
		r.Shuffle(len(states), func(i, j int) { states[i], states[j] = states[j], states[i] })
		if !boards { // the number of nodes tells how many GPUs lack one, and not which; and no file tells of the parameter
			states = slices.DeleteFunc(states, func(s string) bool { return s == byParameter || s == deniedByGroup })
		}
		// NVML alone shows instances, and what it has lost.
		library := slices.Contains(states, emptyMIG) || slices.Contains(states, nvmlLost) || r.IntN(2) == 0
		f := madeHost(t, pattern, states, boards, library)
		what := fmt.Sprintf("%q, boards %v, NVML %v", states, boards, library)

		all := f.services()
		require.Len(t, all, len(states), what)
		verdict, found := Evaluate(f)
		faults := false
		for i, g := range all {
			require.Equal(t, f.Host.GPUs[i].Address, g.Address, what)
			if states[i] == isMeasured {
				require.Equal(t, isExamined, g.service, what)
				continue
			}
			// A choice covers GPUs that could not be used anyway, if they are on the bus, and a driver holds them.
			covered := f.Host.Env[visibleDevices] != "" || slices.Contains(states, besideInstance)
			fault := slices.Contains(broken, states[i]) && !(covered && (states[i] == lostItsNode || states[i] == nvmlLost))
			faults = faults || fault
			want := isExcluded
			if fault {
				want = isReported
			}
			require.Equal(t, want, g.service, "%s at %s: %s", states[i], g.Address, what)
			at := slices.IndexFunc(found, func(one Finding) bool {
				return one.ID == g.finding && slices.ContainsFunc(append(one.Evidence, one.Summary), func(text string) bool { return strings.Contains(text, g.Address) })
			})
			require.GreaterOrEqual(t, at, 0, "%s at %s vanishes from %v: %s", states[i], g.Address, ids(found), what)
			require.Equal(t, fault, found[at].Severity.AtLeast(Warning), "%s: %s", states[i], what)
		}
		for _, one := range found {
			if !faults {
				require.False(t, one.Severity.AtLeast(Warning), "%s: %s", one.ID, what)
			}
		}
		if faults {
			sick++
			require.NotEqual(t, Healthy, verdict, what)
			require.NotEqual(t, Measured, verdict, what)
		} else {
			healthy++
			require.Equal(t, Healthy, verdict, what)
		}
	}
	assert.Greater(t, healthy, hosts/6)
	assert.Greater(t, sick, hosts/6)
}

// Where nothing tells why CUDA does not show a GPU, the host is not healthy.
func TestAGPUThatIsNotExplainedIsNotHealthy(t *testing.T) {
	t.Parallel()
	f := madeHost(t, *host(t, "h200-vm"), []string{isMeasured, besideInstance}, true, true)
	f.Devices[0].UUID = "GPU-00000000-0000-0000-0000-000000000000"
	f.NVML.GPUs[0].MIG = number(false)
	verdict, found := Evaluate(f)
	require.Contains(t, ids(found), "missing_gpus")
	assert.Equal(t, Unknown, verdict)
	for _, one := range found {
		assert.Equal(t, Note, one.Severity, one.ID)
	}
	f.ExpectedGPUs = 1
	verdict, _ = Evaluate(f)
	assert.Equal(t, Healthy, verdict, "somebody says that one is enough")
}

// One of eight GPUs in MIG mode without an instance, as somebody wants it: a note says what excludes it, and the host is
// healthy, which is exit status 0.
func TestAGPUInMIGModeWithoutAnInstance(t *testing.T) {
	t.Parallel()
	for _, boards := range []bool{true, false} {
		states := slices.Repeat([]string{isMeasured}, 8)
		states[5] = emptyMIG
		verdict, found := Evaluate(madeHost(t, *host(t, "h200-vm"), states, boards, true))
		assert.Equal(t, Healthy, verdict)
		require.Equal(t, []string{"mig_without_instance"}, ids(found))
		assert.Equal(t, Note, found[0].Severity)
		assert.Contains(t, found[0].Evidence, "NVML: GPU 5 (00000000:06:00.0): MIG is on, with 0 instances")
		assert.Contains(t, found[0].Remedy, "Leave it if instances are created on demand")
	}
}

// A node that is gone, with the module's list of GPUs and without.
func TestAGPUWhoseNodeIsGone(t *testing.T) {
	t.Parallel()
	for _, boards := range []bool{true, false} {
		states := slices.Repeat([]string{isMeasured}, 8)
		states[5] = lostItsNode
		verdict, found := Evaluate(madeHost(t, *host(t, "h200-vm"), states, boards, true))
		assert.Equal(t, Problems, verdict)
		require.Equal(t, "missing_gpus", found[0].ID)
		assert.Equal(t, "1 of 8 GPUs missing: its device node is missing", found[0].Summary)
		assert.Contains(t, strings.Join(found[0].Evidence, "\n"), "0000:06:00.0")
	}
}
