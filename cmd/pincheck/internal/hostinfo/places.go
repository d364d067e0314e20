package hostinfo

import (
	"cmp"
	"slices"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// signs are what shows a container, a service or a unit.
type signs struct {
	files   files
	environ []string
	groups  []string // paths of the process's control groups
	mounts  []linux.Mount
}

func readSigns(f files, environ []string) *signs {
	s := &signs{files: f, environ: environ}
	members, _ := linux.ReadCgroupMembers(f.fsys)
	for _, m := range members {
		s.groups = append(s.groups, m.Path)
	}
	s.mounts, _ = linux.ReadMounts(f.fsys)
	return s
}

// A sign is a variable or a file that is only there in one place. Several places leave the signs of the ones below
// them too: the first sign in a table counts.
type sign struct{ place, variable, file string }

// first returns the place of the first sign, and what was seen of it.
func (s *signs) first(table []sign) (place, evidence string) {
	for _, one := range table {
		if _, set := LookupEnv(s.environ, one.variable); set && one.variable != "" {
			return one.place, one.variable
		}
		if one.file != "" && s.files.exists(one.file) {
			return one.place, "/" + one.file
		}
	}
	return "", ""
}

// Services set these variables, and put these files into their images.
var services = []sign{
	{"colab", "COLAB_RELEASE_TAG", ""},
	{"colab", "COLAB_GPU", ""},
	{"kaggle", "KAGGLE_KERNEL_RUN_TYPE", ""},
	{"sagemaker", "SAGEMAKER_INTERNAL_IMAGE_URI", "opt/ml/metadata/resource-metadata.json"},
	{"paperspace", "PAPERSPACE_FQDN", ""},
	{"runpod", "RUNPOD_POD_ID", ""},
	{"vast", "VAST_CONTAINERLABEL", ""},
}

// Runtimes that show before the control groups do. Toolbx and Distrobox are containers of Podman or Docker.
var surestContainers = []sign{
	{"kubernetes", "KUBERNETES_SERVICE_HOST", ""},
	{"toolbox", "", "run/.toolboxenv"},
	{"distrobox", "DISTROBOX_ENTER_PATH", "etc/profile.d/distrobox_profile.sh"},
	{"distrobox", "DISTROBOX_HOST_HOME", ""},
	{"podman", "", "run/.containerenv"},
	{"docker", "", ".dockerenv"},
}

// Runtimes that leave nothing in the control groups.
var otherContainers = []sign{
	{"apptainer", "APPTAINER_CONTAINER", ".singularity.d"},
	{"apptainer", "SINGULARITY_CONTAINER", "singularity"},
	{"flatpak", "FLATPAK_ID", ".flatpak-info"},
	{"enroot", "ENROOT_ROOTFS", ""},
}

// cgroupRuntimes are parts of control group paths, with the runtime that uses them.
var cgroupRuntimes = []struct{ part, name string }{
	{"kubepods", "kubernetes"},
	{"docker", "docker"},
	{"libpod", "podman"},
	{"lxc", "lxc"},
	{"containerd", "containerd"},
}

// containerRoots are file systems that the root directories of containers are on.
var containerRoots = []string{"overlay", "fuse.fuse-overlayfs", "fuse.squashfuse_ll", "fuse.squashfuse"}

// readContainer finds the container's runtime.
func (v *Virt) readContainer(s *signs) {
	find := []func() (string, string){
		func() (string, string) { return s.first(surestContainers) },
		s.bySystemd,
		s.byGroup,
		func() (string, string) {
			name, _ := LookupEnv(s.environ, "container")
			return name, "container=" + name
		},
		func() (string, string) { return s.first(otherContainers) },
		s.bySnap,
		s.byRoot,
	}
	for _, sees := range find {
		if name, evidence := sees(); name != "" {
			v.Container = name
			v.found("container", evidence)
			return
		}
	}
}

// bySystemd finds the name that systemd has found. It counts WSL as a container.
func (s *signs) bySystemd() (name, evidence string) {
	if name = s.files.line("run/systemd/container"); name == "wsl" {
		return "", ""
	}
	return name, "/run/systemd/container: " + name
}

// byGroup looks into the control groups. A namespace hides their paths, not the roots of their mounts.
func (s *signs) byGroup() (name, evidence string) {
	for _, r := range cgroupRuntimes {
		for _, group := range s.groups {
			if strings.Contains(group, r.part) {
				return r.name, "/proc/self/cgroup: " + group
			}
		}
		for _, m := range s.mounts {
			if (m.Type == "cgroup" || m.Type == "cgroup2") && strings.Contains(m.Root, r.part) {
				return r.name, "/proc/self/mountinfo: " + m.Root
			}
		}
	}
	return "", ""
}

// bySnap finds a snap that AppArmor confines. Classic snaps, whose programs see the host, have their label in
// complain mode.
func (s *signs) bySnap() (name, evidence string) {
	label := strings.Trim(s.files.line("proc/self/attr/current"), "\x00")
	if strings.HasPrefix(label, "snap.") && strings.HasSuffix(label, "(enforce)") {
		return "snap", "/proc/self/attr/current: " + label
	}
	return "", ""
}

func (s *signs) byRoot() (name, evidence string) {
	for _, m := range s.mounts {
		if m.Point == "/" && slices.Contains(containerRoots, m.Type) {
			return "container", "/proc/self/mountinfo: " + m.Type + " on /"
		}
	}
	return "", ""
}

// readService finds the service, and what a container of Docker Desktop shows beside the kernel: its directories are
// in a disk of their own.
func (v *Virt) readService(s *signs) {
	place, evidence := s.first(services)
	v.Service = place
	v.found("service", evidence)
	const desktop = "/version-pack-data/community/docker/"
	if v.Container == "docker" && slices.ContainsFunc(s.mounts, func(m linux.Mount) bool { return strings.HasPrefix(m.Root, desktop) }) {
		v.DockerDesktop = true
		v.found("docker_desktop", "/proc/self/mountinfo: "+desktop)
	}
}

// SlurmJob returns the id of the job that the process is in, and whether it got GPUs. in is false outside of jobs.
func (h *Host) SlurmJob() (id string, gpus, in bool) {
	id, granted := h.Env["SLURM_JOB_ID"], cmp.Or(h.Env["SLURM_JOB_GPUS"], h.Env["SLURM_STEP_GPUS"])
	return id, granted != "", id != "" || granted != ""
}

// Places returns where the process runs by the names of package findings, the nearest first. A remedy is that of the
// first place that has one. A job of Slurm that got no GPU lacks it for that reason, whatever container it is in.
func (h *Host) Places() (places []string) {
	if h == nil {
		return nil
	}
	v := &h.Virt
	_, gpus, job := h.SlurmJob()
	add := func(is bool, place string) {
		if is && place != "" {
			places = append(places, place)
		}
	}
	if v.Service != "" {
		return []string{v.Service} // whose container nobody who rents it can start again
	}
	add(job && !gpus, "slurm")
	add(v.Container == "docker" && v.Tegra, "docker on jetson")
	add(v.Container == "docker" && v.DockerDesktop, "docker desktop")
	add(v.Container == "podman" && v.Mapped, "podman without root")
	add(true, v.Container)
	add(job && gpus, "slurm")
	add(v.Container == "" && !job, cmp.Or(map[bool]string{true: "systemd"}[v.Unit != ""], map[bool]string{true: "wsl"}[v.WSL]))
	return places
}

// placeNames are the names of containers and services in text.
var placeNames = map[string]string{
	"apptainer":  "Apptainer container",
	"colab":      "Google Colab",
	"container":  "container",
	"distrobox":  "Distrobox container",
	"docker":     "Docker container",
	"enroot":     "enroot container",
	"flatpak":    "Flatpak sandbox",
	"gvisor":     "gVisor sandbox",
	"kaggle":     "Kaggle",
	"kubernetes": "Kubernetes pod",
	"lxc":        "LXC container",
	"paperspace": "Paperspace",
	"podman":     "Podman container",
	"runpod":     "RunPod",
	"sagemaker":  "Amazon SageMaker",
	"snap":       "snap",
	"toolbox":    "Toolbx container",
	"vast":       "Vast.ai",
}

// Where returns where the process runs in words, the nearest first: Docker container, Slurm job 7, guest of KVM.
// It is empty on a machine without any of them.
func (h *Host) Where() (places []string) {
	v := &h.Virt
	if v.Service != "" {
		places = append(places, placeNames[v.Service])
	}
	if c := v.Container; c != "" {
		name := cmp.Or(placeNames[c], "container of "+c)
		if c == "docker" && v.DockerDesktop {
			name = "Docker Desktop container"
		}
		places = append(places, name)
	}
	if v.Sandbox != "" && v.Sandbox != v.Container {
		places = append(places, cmp.Or(placeNames[v.Sandbox], v.Sandbox))
	}
	switch id, gpus, job := h.SlurmJob(); {
	case job && !gpus:
		places = append(places, strings.TrimSpace("Slurm job "+id)+" without a GPU")
	case job:
		places = append(places, strings.TrimSpace("Slurm job "+id))
	case v.Unit != "" && v.Container == "":
		places = append(places, "unit "+v.Unit)
	}
	switch {
	case v.WSL:
		places = append(places, "WSL")
	case v.Tegra:
		places = append(places, cmp.Or(v.Board, "Tegra"))
	case v.VM:
		places = append(places, cmp.Or(guestOf(v.Hypervisor), "virtual machine"))
	}
	return places
}
