// Package loader feeds a GPU with batches of samples: many goroutines fill
// them in pinned memory, copies overlap with filling and with the consumer's
// work, and a loop gets them one after another.
//
//	l, err := loader.New(ctx, dev, source, loader.Options{BatchSize: 256, Shuffle: true})
//	for batch, err := range l.Batches(ctx) { // an epoch
//		if err != nil {
//			return err
//		}
//		if err := batch.Use(stream); err != nil {
//			return err
//		}
//		// queue work on stream, with batch.Field(0) and batch.Len()
//	}
//	err = l.Close()
//
// A [Source] writes a sample straight into its place in a batch. Waiting for
// disks and networks belongs in its Read, of which thousands may run at once;
// computing belongs in Transform, of which as many run as there are cores. A
// [BatchSource] reads many samples in one call; [Memory] is one, of samples in memory
// or in a mapped file.
//
// # Loops and epochs
//
// A loop that ends by break or return keeps its epoch: the next loop goes on with the next
// batch, and batches that are filled already stay. So a program can do something else in
// between, without a second loader:
//
//	for epoch := range l.Epochs(10) {
//		for batch, err := range l.Batches(ctx) {
//			…
//			if steps++; steps%1000 == 0 {
//				break // the next loop goes on with the next batch
//			}
//		}
//		validate()
//	}
//
// After the last batch of an epoch the next loop begins the next epoch. So it does after an
// error, and after the end of the loop's context. [Loader.EndEpoch] skips the rest of an
// epoch. [Loader.Epochs] has an epoch again until all of it was given. Between loops the source
// is not called.
//
// # Memory lifetime
//
// [New] allocates all memory: (Prefetch + 1) batches, pinned and on the device.
// A batch belongs to the loop's body for one turn, or until Release if the body
// calls Keep. After that the loader uses its memory again:
//
//   - pinned memory is filled again when the batch's copy is done;
//   - device memory is written again when the streams that were passed to Use
//     have done what was queued on them until the release. The device waits for
//     that (cudaStreamWaitEvent), the host does not.
//
// What the GPU is done with is filled again from the first batch in memory on, so that
// no more memory is in use at a time than the pace needs.
//
// Memory of which CUDA cannot say that it is unused is not used again: the
// epoch ends with the error, and Close returns it, until CUDA can.
//
// # Copies
//
// A batch is copied as soon as its last sample is there, in one copy. While two copies
// are on their way, batches of 2 MiB or less wait for the next ones, so that
// neighbours in memory go in one copy of 4 MiB or less: until the link has room for
// another copy, and no longer than a millisecond.
//
// Batches of one copy share the calls for it: the consumer's stream waits once for all of
// them (cudaStreamWaitEvent). For the end of the work on a batch an event is recorded
// (cudaEventRecord) only if the stream has got work since the last one: by Release, or for a
// batch that the loop releases by the next Use.
//
// One goroutine at a time makes the loader's calls into CUDA, a worker mostly. If one does
// not return, New, Batches and Close end with their contexts all the same. The memory stays
// allocated until it returns.
//
// # Order
//
// Batches come in the order of their numbers, unless Options.Unordered is set.
// With Shuffle each epoch has an order of its own, which depends on the seed
// and the epoch only. [Batch.Position] is the place after a batch. With it as Options.Start
// another process goes on with the batch with which the next loop would: after the last one
// with the next epoch.
//
// # Errors
//
// A sample that fails ends the epoch, after the batches before its own; or it is
// tried again (Options.Retries), or left out (Options.SkipErrors). These fail as
// well: a source that panics, one that ends its goroutine (runtime.Goexit, which
// testing.T.FailNow calls), and one that reads a mapped file which was cut short
// (SIGBUS). If that happens to a BatchSource in a call for many samples, they are read
// one at a time, which shows which of them it was.
//
// # What is slow
//
// [Loader.Stats] says where the time went, and [Stats.Bottleneck] which stage
// the others wait for.
package loader
