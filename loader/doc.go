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
// A [Source] writes a sample straight into its place in a batch. What waits for
// disks and networks belongs into its Read, of which thousands may run at once,
// and what computes into Transform, of which as many run as there are cores.
//
// # Memory lifetime
//
// All memory is allocated by [New]: (Prefetch + 1) batches, pinned and on the
// device. A batch is lent for a turn of the loop, or until Release if it is
// kept. Its memory on the device is written again only when the streams it was
// given to by Use have done what was queued by then; nobody on the host waits
// for that.
//
// # Order
//
// Batches come in the order of their numbers, unless Options.Unordered is set.
// With Shuffle each epoch has an order of its own, which depends on the seed
// and the epoch only, and takes no memory. [Batch.Position] is where another
// process can go on.
//
// # Errors
//
// A sample that fails ends the epoch, after the batches before it; or it is
// tried again, or left out (Options). A source that panics fails.
//
// # What is slow
//
// [Loader.Stats] says where the time went, and [Stats.Bottleneck] which stage
// the others wait for.
package loader
