package main

import (
	"os"
	"os/exec"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// cpuTime returns the CPU time of the process in user and kernel mode (getrusage).
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// startOn starts a command that may run on so many CPUs only, the first that this process may
// run on; on all of those if cpus is 0. The runtime of a Go program then sets GOMAXPROCS to that number.
func startOn(cmd *exec.Cmd, cpus int) error {
	if cpus == 0 {
		return cmd.Start()
	}
	runtime.LockOSThread() // a child inherits the affinity of the thread that starts it
	defer runtime.UnlockOSThread()
	var all, some unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return os.NewSyscallError("sched_getaffinity", err)
	}
	for i := 0; some.Count() < min(cpus, all.Count()); i++ {
		if all.IsSet(i) {
			some.Set(i)
		}
	}
	if err := unix.SchedSetaffinity(0, &some); err != nil {
		return os.NewSyscallError("sched_setaffinity", err)
	}
	err := cmd.Start()
	if restored := unix.SchedSetaffinity(0, &all); err == nil {
		err = os.NewSyscallError("sched_setaffinity", restored)
	}
	return err
}

// mapUntouched maps n bytes that no page has been allocated for.
func mapUntouched(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
}

func unmap(mem []byte) error { return unix.Munmap(mem) }

// freeBytes returns the number of bytes that fit into the file system of a folder.
func freeBytes(folder string) (int, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(folder, &s); err != nil {
		return 0, os.NewSyscallError("statfs", err)
	}
	return int(s.Bavail) * int(s.Bsize), nil
}

// dropPages removes a file's pages from the page cache, and returns how many stay: all, on file
// systems that are in memory.
func dropPages(f *os.File, n int) (stay int, err error) {
	if err := f.Sync(); err != nil {
		return 0, err
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return 0, os.NewSyscallError("fadvise", err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, os.NewSyscallError("mmap", err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	resident := make([]byte, (n+os.Getpagesize()-1)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(n), uintptr(unsafe.Pointer(&resident[0]))); errno != 0 {
		return 0, os.NewSyscallError("mincore", errno)
	}
	for _, b := range resident {
		stay += int(b & 1)
	}
	return stay, nil
}
