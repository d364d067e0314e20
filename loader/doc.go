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
// A [Source] writes a sample straight into a batch. Waiting for
// disks and networks belongs in its Read, which thousands of goroutines may call at once;
// computing belongs in Options.Transform, which one goroutine for each core calls. A
// [BatchSource] reads many samples in one call; [InMemory] returns one, of samples in memory
// or in a mapped file. Where that memory is pinned, the GPU gathers the batches itself, and
// no goroutine copies. [Shards] does the same with files that are larger than memory: some of them are pinned
// at a time, and samples are shuffled among those only.
//
// # Loops and epochs
//
// A loop that ends by break or return keeps its epoch: the next loop continues with the next batch,
// and filled batches stay. So a program can do something else in between, without a second loader:
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
// After the last batch of an epoch, after an error, and after the end of the loop's context, the
// next loop begins the next epoch. [Loader.EndEpoch] skips the rest of an epoch. [Loader.Epochs]
// repeats an epoch until all of its batches were delivered. Between loops the source is not called.
//
// # Parts of a data set
//
// A loader reads samples 0 to Len()-1 of its source, each once an epoch. A source that maps
// these numbers to others makes other epochs of the same data: see the examples.
//
//   - A shard: the process with this rank, of world processes, reads sample i*world+rank of the
//     data as its sample i. Len is n/world, so that all ranks have the same number of batches.
//     Give all ranks the same Seed: the position of one rank then resumes all of them.
//   - A subset, such as one for validation: sample list[i] as sample i.
//   - Weighted sampling: sample i is a random draw with the weights. Len is the number of draws of
//     an epoch. Seed the generator of a draw with i and the epoch, so that a repeated Read gets
//     the same sample. The source may change between loops: set its epoch in the loop over
//     [Loader.Epochs]. In the same way ranks share a random order of the whole data set.
//   - Samples of variable length: the fields have the length of the longest sample, and one more
//     field has the length of the sample. If most samples are much shorter, use a source and a
//     loader for each group of similar lengths, which copy fewer bytes.
//
// [Batch.Indices] returns numbers of the loader's source: map them too.
//
// # Memory lifetime
//
// [New] allocates all memory: (Prefetch + 1) batches, pinned and on the device. Only [Shards] are
// pinned and unpinned while loops run, by a separate goroutine. A batch belongs to the loop's body
// for one turn, or until Release if the body calls [Batch.Retain]. After that the loader uses its
// memory again:
//
//   - it fills the pinned memory when the batch's copy has completed;
//   - it writes the device memory when the streams of Use have completed the work that was
//     queued on them until the release. The device waits for that (cudaStreamWaitEvent), the
//     host does not.
//
// Memory that the GPU no longer uses is filled again from the lowest address on, so that the
// loader uses no more memory than its rate needs.
//
// If CUDA cannot report that memory is unused, the loader does not use it again: the
// epoch ends with the error, and Close returns the error, until CUDA can.
//
// [NewHost] makes a loader without a device, which fills host memory of the caller.
//
// # Copies
//
// A batch is copied when its last sample is filled, in one copy. While two copies
// are in flight, batches of 2 MiB or less wait for the next ones, so that
// neighbours in memory share a copy of 4 MiB or less: until one of the two copies has
// completed, and at most a millisecond. Small batches get neighbours: their memory is handed to the workers in ranges.
//
// Batches of one copy share the calls for it: the consumer's stream waits once for all of
// them (cudaStreamWaitEvent).
//
// One goroutine at a time makes the loader's calls into CUDA, mostly a worker. Even if a call does
// not return, New, Batches and Close return when their contexts end. The memory stays allocated
// until the call returns.
//
// # Order
//
// Batches come in the order of their numbers, unless Options.Unordered is set. With Shuffle each
// epoch has an order of its own, which depends on the seed and the epoch only; that of [Shards] on
// the sizes of shards and windows, too. [Batch.Position] is the place after a batch. With this
// position as Options.Start, another process continues with the batch that the next loop would
// deliver: after the last batch, with the next epoch.
//
// # Errors
//
// A sample that fails ends the epoch, after the batches before its own; or it is
// tried again (Options.Retries), or skipped (Options.SkipErrors). A sample fails, too, if the
// source panics, ends its goroutine (runtime.Goexit, which testing.T.FailNow calls), or reads a
// mapped file that was truncated (SIGBUS). If a BatchSource fails in a call for many samples,
// they are read one at a time, which finds the sample that fails.
//
// # Slow stages
//
// [Loader.Stats] returns the time of each stage, and [Stats.Bottleneck] the stage for which
// the others wait.
package loader
