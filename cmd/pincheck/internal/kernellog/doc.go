// Package kernellog finds what the kernel's log contains about GPUs: Xids and other messages of NVIDIA's kernel module,
// errors of PCI Express, refused modules, and killed processes.
//
// [Read] reads the log of this host. [Parse] parses that text, and what dmesg, dmesg -T and journalctl -k print.
package kernellog
