// Package shm keeps pinned host memory that processes share and that outlives them, such as a model that the next process
// finds in memory.
//
//	m, err := shm.Create(ctx, "model", n, shm.Options{Keep: true}) // in one process
//	err = m.Begin()
//	…                                                              // fill m.Bytes()
//	err = m.Complete("llama, revision 5")
//
//	m, err := shm.Open(ctx, "model", shm.Options{ReadOnly: true})  // in any other, also later
//	buf, err := m.Register(ctx, dev, hostmem.RegisterOptions{Background: true})
//	err = copier.Upload(ctx, dst, m.Bytes())                       // at once; see RegisterOptions.Background
//
// A memory is a file of a file system that is in memory: of /dev/shm, of another tmpfs, of hugetlbfs for huge pages, or
// without a name (a memfd), for processes that receive its descriptor (SCM_RIGHTS, systemd's file descriptor store). Its
// pages exist once, however many processes map and register them. No daemon is needed.
//
// # Life
//
// A memory exists while a process has it open, and with Options.Keep until [Remove]. Each process has a lock on the file
// (flock), which the kernel releases when the process ends, however it ends: nobody waits for a process that was killed.
// The last process that closes a memory removes its name. If that was killed, the name stays until the next Create with
// this name or the next [Sweep]. [List] returns what there is, how old it is, and who has it open.
//
// # Content
//
// The first page of the file is a header, with the size, the process that made it, and the state of the content. The
// content is incomplete from [Memory.Begin] until [Memory.Complete], also if the process that writes it is killed: then
// another one can begin. One process writes at a time. Readers compare [Content].Generation before and after a copy.
//
// # Trust
//
// Processes that may write the file can change its bytes at any time, and, if it has a name, its size: reading bytes that
// it has lost ends a process (SIGBUS). So a file has mode 0600 unless Options.Mode is set, and Open refuses files of other
// users unless Options.AnyOwner is set. A memory without a name cannot change its size (F_SEAL_SHRINK). Headers are
// checked, and no header makes a call fail in another way than by its error.
package shm
