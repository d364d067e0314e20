package hostinfo_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/assert"

	"github.com/gopinned/pinned/cmd/pincheck/internal/capture"
	"github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"
)

// Each place is found by what it leaves, the nearest first, and the evidence names the file or variable.
func TestPlaces(t *testing.T) {
	t.Parallel()
	text := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s), Mode: 0o444} }
	const cgroup, release, mounts = "proc/self/cgroup", "proc/sys/kernel/osrelease", "proc/self/mountinfo"
	for name, c := range map[string]struct {
		files   fstest.MapFS
		environ []string
		places  string // joined by "; "
		where   string
		by      map[string]string // some of the evidence
	}{
		"bare":    {files: fstest.MapFS{release: text("6.8.0-45-generic\n"), cgroup: text("0::/user.slice/user-1000.slice/session-3.scope\n")}},
		"desktop": {files: fstest.MapFS{cgroup: text("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-code.scope\n")}},
		"unit": {
			files:  fstest.MapFS{cgroup: text("0::/system.slice/train.service\n"), mounts: text("31 23 0:28 / /dev rw - tmpfs tmpfs rw\n")},
			places: "systemd", where: "unit train.service",
			by: map[string]string{"systemd_unit": "/proc/self/cgroup: /system.slice/train.service", "private_devices": "/proc/self/mountinfo: tmpfs on /dev"},
		},
		"docker": {files: fstest.MapFS{".dockerenv": text("")}, places: "docker", where: "Docker container", by: map[string]string{"container": "/.dockerenv"}},
		"docker by its cgroup": {
			files: fstest.MapFS{cgroup: text("12:devices:/docker/1f2e\n")}, places: "docker", where: "Docker container",
			by: map[string]string{"container": "/proc/self/cgroup: /docker/1f2e"},
		},
		"docker on a guest of KVM": {
			files:  fstest.MapFS{".dockerenv": text(""), "sys/class/dmi/id/sys_vendor": text("QEMU\n"), "sys/class/dmi/id/product_name": text("Standard PC\n")},
			places: "docker", where: "Docker container; guest of KVM or QEMU", by: map[string]string{"hypervisor": "/sys/class/dmi/id: QEMU Standard PC"},
		},
		"docker on a Jetson": {
			files:  fstest.MapFS{".dockerenv": text(""), "proc/device-tree/model": text("NVIDIA Jetson Orin Nano\x00")},
			places: "docker on jetson; docker", where: "Docker container; NVIDIA Jetson Orin Nano", by: map[string]string{"tegra": "/proc/device-tree/model: NVIDIA Jetson Orin Nano"},
		},
		"docker desktop": {
			files:   fstest.MapFS{".dockerenv": text(""), release: text("5.15.167.4-microsoft-standard-WSL2\n"), mounts: text("9 8 8:32 /version-pack-data/community/docker/containers/1f/hosts /etc/hosts rw - ext4 /dev/sdc rw\n")},
			places:  "docker desktop; docker",
			where:   "Docker Desktop container; WSL",
			by:      map[string]string{"docker_desktop": "/proc/self/mountinfo: /version-pack-data/community/docker/", "wsl": "/proc/sys/kernel/osrelease: 5.15.167.4-microsoft-standard-WSL2"},
			environ: []string{"PATH=/bin"},
		},
		"docker desktop's own machine": {files: fstest.MapFS{".dockerenv": text(""), release: text("6.10.14-linuxkit\n")}, places: "docker desktop; docker", where: "Docker Desktop container"},
		"podman":                       {files: fstest.MapFS{"run/.containerenv": text("")}, places: "podman", where: "Podman container"},
		"podman without root": {
			files:  fstest.MapFS{"run/.containerenv": text(""), "proc/self/uid_map": text("         0       1000          1\n         1     100000      65536\n")},
			places: "podman without root; podman", where: "Podman container", by: map[string]string{"user_namespace": "/proc/self/uid_map: 0 1000 1"},
		},
		"toolbox":       {files: fstest.MapFS{"run/.containerenv": text(""), "run/.toolboxenv": text("")}, places: "toolbox", where: "Toolbx container"},
		"distrobox":     {files: fstest.MapFS{"run/.containerenv": text("")}, environ: []string{"DISTROBOX_ENTER_PATH=/usr/bin/distrobox-enter"}, places: "distrobox", where: "Distrobox container", by: map[string]string{"container": "DISTROBOX_ENTER_PATH"}},
		"pod":           {environ: []string{"KUBERNETES_SERVICE_HOST=10.96.0.1"}, places: "kubernetes", where: "Kubernetes pod", by: map[string]string{"container": "KUBERNETES_SERVICE_HOST"}},
		"pod by cgroup": {files: fstest.MapFS{mounts: text("9 8 0:28 /kubepods/burstable/pod1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n")}, places: "kubernetes", where: "Kubernetes pod", by: map[string]string{"container": "/proc/self/mountinfo: /kubepods/burstable/pod1"}},
		"apptainer":     {files: fstest.MapFS{".singularity.d/env": text("")}, places: "apptainer", where: "Apptainer container", by: map[string]string{"container": "/.singularity.d"}},
		"lxc without privileges": {
			files:  fstest.MapFS{"run/systemd/container": text("lxc\n"), "proc/self/uid_map": text("0 100000 65536\n")},
			places: "lxc", where: "LXC container", by: map[string]string{"container": "/run/systemd/container: lxc", "user_namespace": "/proc/self/uid_map: 0 100000 65536"},
		},
		"snap":            {files: fstest.MapFS{"proc/self/attr/current": text("snap.trainer.run (enforce)\n")}, places: "snap", where: "snap"},
		"a classic snap":  {files: fstest.MapFS{"proc/self/attr/current": text("snap.code.code (complain)\n")}},
		"flatpak":         {files: fstest.MapFS{".flatpak-info": text("")}, places: "flatpak", where: "Flatpak sandbox"},
		"wsl":             {files: fstest.MapFS{release: text("5.15.153.1-microsoft-standard-WSL2\n"), "run/systemd/container": text("wsl\n")}, places: "wsl", where: "WSL"},
		"wsl by its node": {files: fstest.MapFS{"dev/dxg": text("")}, places: "wsl", where: "WSL", by: map[string]string{"wsl": "/dev/dxg"}},
		"gvisor":          {files: fstest.MapFS{"proc/version": text("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n")}, places: "gvisor", where: "gVisor sandbox"},
		"gvisor's docker": {files: fstest.MapFS{".dockerenv": text(""), "proc/version": text("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n")}, places: "docker", where: "Docker container; gVisor sandbox"},
		"another runtime": {files: fstest.MapFS{mounts: text("9 8 0:28 / / rw - overlay overlay rw\n")}, places: "container", where: "container", by: map[string]string{"container": "/proc/self/mountinfo: overlay on /"}},
		"job":             {environ: []string{"SLURM_JOB_ID=7", "SLURM_JOB_GPUS=0"}, files: fstest.MapFS{cgroup: text("0::/system.slice/slurmstepd.scope/job_7/step_0\n")}, places: "slurm", where: "Slurm job 7"},
		"job without GPU": {environ: []string{"SLURM_JOB_ID=7"}, files: fstest.MapFS{".dockerenv": text("")}, places: "slurm; docker", where: "Docker container; Slurm job 7 without a GPU"},
		"step with a GPU": {environ: []string{"SLURM_JOB_ID=7", "SLURM_STEP_GPUS=1", "ENROOT_ROOTFS=/tmp/x"}, places: "enroot; slurm", where: "enroot container; Slurm job 7"},
		"colab":           {environ: []string{"COLAB_RELEASE_TAG=release-colab"}, files: fstest.MapFS{".dockerenv": text(""), "proc/cpuinfo": text("processor : 0\nflags : fpu hypervisor\n")}, places: "colab", where: "Google Colab; Docker container; virtual machine", by: map[string]string{"service": "COLAB_RELEASE_TAG", "vm": "/proc/cpuinfo: flags: hypervisor"}},
		"sagemaker":       {files: fstest.MapFS{"opt/ml/metadata/resource-metadata.json": text("{}"), "sys/class/dmi/id/sys_vendor": text("Amazon EC2\n"), "sys/class/dmi/id/product_name": text("g5.xlarge\n")}, places: "sagemaker", where: "Amazon SageMaker; guest of Amazon EC2"},
		"azure":           {files: fstest.MapFS{"sys/class/dmi/id/sys_vendor": text("Microsoft Corporation\n"), "sys/class/dmi/id/product_name": text("Virtual Machine\n")}, where: "guest of Hyper-V"},
		"xen":             {files: fstest.MapFS{"sys/hypervisor/type": text("xen\n")}, where: "guest of Xen", by: map[string]string{"hypervisor": "/sys/hypervisor/type: xen"}},
		"metal of Amazon": {files: fstest.MapFS{"sys/class/dmi/id/sys_vendor": text("Amazon EC2\n"), "sys/class/dmi/id/product_name": text("g5.metal\n")}},
	} {
		h := hostinfo.Read(c.files, c.environ)
		assert.Equal(t, c.places, strings.Join(h.Places(), "; "), name)
		assert.Equal(t, c.where, strings.Join(h.Where(), "; "), name)
		for field, evidence := range c.by {
			assert.Equal(t, evidence, h.Virt.Evidence[field], "%s: %s", name, field)
		}
		// A capture of the host has the same places with the same evidence.
		again := hostinfo.Read(c.files, capture.Environ(h))
		assert.Equal(t, h.Virt, again.Virt, name)
		assert.Equal(t, h.Places(), again.Places(), name)
	}
}

// Evidence is part of a line, whatever a file holds.
func TestEvidenceIsShort(t *testing.T) {
	t.Parallel()
	h := hostinfo.Read(fstest.MapFS{"proc/self/cgroup": {Data: []byte("0::/docker/" + strings.Repeat("\xff\x1b", 1<<16) + "\n")}}, nil)
	for _, evidence := range slices.Collect(maps.Values(h.Virt.Evidence)) {
		assert.LessOrEqual(t, len(evidence), 220)
	}
	assert.Equal(t, "docker", h.Virt.Container)
}
