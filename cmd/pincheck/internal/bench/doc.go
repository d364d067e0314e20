// Package bench has the experiments of pincheck: what each measures, on which memory, and which
// question it answers. [measure.Run] runs them.
//
// # An experiment
//
// An experiment is a [measure.Experiment] in a file of its own, and an entry in [All]. Its Plan
// returns groups of cases and allocates nothing. The group's Open allocates, its cases take samples,
// and Close releases everything, also after an error of Open. [resources] does that: what is
// allocated through it is released in reverse order, after its streams have finished.
//
// # Samples
//
// A sample's clock starts before the first byte is copied and stops after the last one has arrived.
// Copies on a stream are timed by events on that stream (cudaEventElapsedTime); copies in which the
// calling thread takes part are timed by the host's clock. The first samples are discarded: they
// make contexts, populate pages and train the link up.
//
// What an experiment copies it verifies: source and target have different patterns, the target is
// overwritten before, and all bytes are compared after the samples. A mismatch makes the series an
// error. A hostkind.Memory of each [hostKind] hides how memory is allocated and copied, so that a
// copyFixture measures and verifies all kinds in the same way.
//
// # Answers
//
// Explain turns the series into sentences. It gets whatever was measured, which may be nothing, and
// selects series by name and labels. Figures in answers come from the largest size measured, unless
// the sentence names another one.
//
// # Simulated GPUs
//
// Tests run every experiment on a simulated GPU, whose copies have the time of a link model, and
// interrupt it at sampled calls. Sizes are smaller there (maxSimulated), since copies cost the
// host's time.
package bench
