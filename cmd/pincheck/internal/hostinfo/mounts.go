package hostinfo

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gopinned/pinned/internal/linux"
)

// Mount is a file system that data can be loaded from. Its source is left out, because it
// names hosts.
type Mount struct {
	Point string `json:"point"`
	Type  string `json:"type"` // nfs4, ext4, overlay, fuse.gcsfuse
	// Network is that the data come from another machine.
	Network bool `json:"network,omitempty"`
	// ReadAhead is the number of bytes that the kernel reads ahead of a program that reads in order
	// (read_ahead_kb); unknown for file systems without a device of their own.
	ReadAhead Limit `json:"read_ahead_bytes,omitzero"`
	// Size is the limit of a tmpfs (size=); unknown without one.
	Size Limit `json:"size_bytes,omitzero"`
}

// networkTypes are file systems of other machines. Those of FUSE have a word of theirs
// after "fuse.".
var networkTypes = []string{"nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "9p", "virtiofs", "beegfs",
	"gpfs", "wekafs", "afs", "glusterfs", "panfs", "orangefs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "gcsfuse",
	"fuse.mount-s3", "mountpoint-s3", "fuse.goofys", "fuse.rclone", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.juicefs",
	"fuse.blobfuse", "fuse.blobfuse2", "fuse.alluxio"}

// localTypes are file systems of this machine.
var localTypes = []string{"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs", "fuseblk", "erofs", "squashfs"}

// maxMounts limits what is kept of a host with very many.
const maxMounts = 64

// skipped are directories of systems, in which no data lie.
var skipped = []string{"/proc", "/sys", "/dev", "/run", "/etc", "/boot", "/snap", "/var/lib/kubelet", "/var/lib/docker", "/var/lib/containerd", "/usr"}

func readMounts(f files) (out []Mount) {
	mounts, _ := linux.ReadMounts(f.fsys)
	for _, m := range mounts {
		network := slices.Contains(networkTypes, m.Type)
		if !network && !slices.Contains(localTypes, m.Type) || len(out) == maxMounts {
			continue
		}
		if m.Point != "/dev/shm" && slices.ContainsFunc(skipped, func(dir string) bool {
			return m.Point == dir || strings.HasPrefix(m.Point, dir+"/")
		}) {
			continue
		}
		mount := Mount{Point: m.Point, Type: m.Type, Network: network}
		if kib, err := linux.ReadInt(f.fsys, "sys/class/bdi/"+m.Device+"/read_ahead_kb"); err == nil && kib >= 0 && kib < 1<<30 {
			mount.ReadAhead = limitOf(kib << 10)
		}
		if m.Type == "tmpfs" {
			mount.Size = sizeOf(m.Options)
		}
		out = append(out, mount)
	}
	return out
}

// sizeOf returns the size of a tmpfs by its options, in which the kernel writes it in KiB: size=65536k.
func sizeOf(options []string) Limit {
	for _, option := range options {
		text, ok := strings.CutPrefix(option, "size=")
		if kib, err := strconv.Atoi(strings.TrimSuffix(text, "k")); ok && err == nil && kib > 0 && kib < math.MaxInt>>23 {
			return limitOf(kib << 10)
		}
	}
	return Limit{}
}

// Mount returns the mount that a file is in: the one with the longest path.
func (h *Host) Mount(file string) (found Mount, ok bool) {
	for _, m := range h.Mounts {
		inside := m.Point == "/" || file == m.Point || strings.HasPrefix(file, m.Point+"/")
		if inside && (!ok || len(m.Point) >= len(found.Point)) {
			found, ok = m, true
		}
	}
	return found, ok
}
