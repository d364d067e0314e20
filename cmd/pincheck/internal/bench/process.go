// The memory of a running process as a result of the experiment memory (pincheck bench memory --pid): pinned
// memory and its largest blocks, by the kernel's files of the process. There is no clock, and nothing is allocated.

package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/procmem"
	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/bounded"
	"github.com/gopinned/pinned/internal/units"
)

const (
	processName = "process_memory"
	blockName   = "process_block"
	kindLabel   = "kind"
	blockLabel  = "block"
	// shownBlocks is the number of the largest blocks that are listed.
	shownBlocks = 16
)

// ReadMemory reads the memory of a running process below root, which is [os.DirFS] of "/",
// as a result of the experiment memory. It measures nothing, and the process goes on. What
// it says of rounding is a guess, and named so. Errors are those of [procmem.Read].
func ReadMemory(root fs.FS, pid int) (*result.Bench, error) {
	started := time.Now()
	p, err := procmem.Read(root, pid)
	if err != nil {
		return nil, err
	}
	b := &result.Bench{
		Name: memoryName, Question: fmt.Sprintf("How much memory does process %d (%s) pin?", p.PID, p.Name),
		Views: []result.View{
			{Title: "Memory of the process", Series: processName, X: kindLabel},
			{Title: "Largest blocks of pinned memory", Series: blockName, X: blockLabel},
		},
		Errors: []string{}, Complete: true, Started: started.UTC(),
		Series: processSeries(p), Answers: processAnswers(p), Notes: processNotes(p),
	}
	b.Seconds = time.Since(started).Seconds()
	return b, nil
}

const (
	changesName = "pinned_blocks"
	changedName = "pinned_bytes"
	changeLabel = "change"
	// lookEvery is the time between two looks of WatchMemory.
	lookEvery = 100 * time.Millisecond
)

// WatchMemory is ReadMemory, and counts then for a time how often the process pins and unpins. It
// ends earlier with the process, or with ctx, whose error it returns with what it has seen. after is [time.After].
func WatchMemory(ctx context.Context, root fs.FS, pid int, duration time.Duration, after func(time.Duration) <-chan time.Time) (*result.Bench, error) {
	b, err := ReadMemory(root, pid)
	if err != nil {
		return nil, err
	}
	changes := procmem.NewChanges(root, pid)
	began, looks := time.Now(), 0
	for {
		if err = changes.Look(); err != nil {
			break
		}
		looks++
		if time.Since(began) >= duration {
			break
		}
		select {
		case <-ctx.Done():
			err = bounded.Ended(ctx)
		case <-after(min(lookEvery, duration-time.Since(began))):
		}
		if err != nil {
			break
		}
	}
	watched := time.Since(began)
	if errors.Is(err, fs.ErrNotExist) && looks > 0 {
		b.Notes, err = append(b.Notes, fmt.Sprintf("the process ended after %v", watched.Round(lookEvery))), nil
	}
	b.Complete = err == nil
	b.Seconds += watched.Seconds()
	for _, c := range []struct {
		name string
		procmem.Blocks
	}{{"appeared", changes.Appeared}, {"vanished", changes.Vanished}} {
		b.Series = append(b.Series, result.Single(changesName, labelled(changeLabel, c.name), result.Count, float64(c.Count)),
			result.Single(changedName, labelled(changeLabel, c.name), result.Bytes, float64(c.Bytes)))
	}
	b.Views = append(b.Views, result.View{Title: "Blocks that the process pinned and unpinned", Series: changesName, X: changeLabel},
		result.View{Title: "Bytes that it pinned and unpinned", Series: changedName, X: changeLabel})
	b.Answers = append(b.Answers, changesAnswer(changes, watched, looks))
	b.Notes = append(b.Notes, fmt.Sprintf("mappings are compared every %v: a block that comes and goes between two looks does not count, and memory of cudaHostRegister does not show, except hostmem's", lookEvery))
	return b, err
}

func changesAnswer(c *procmem.Changes, watched time.Duration, looks int) string {
	within := fmt.Sprintf("In %.1f s (%s)", watched.Seconds(), units.Things(looks, "look", "looks"))
	if c.Appeared.Count+c.Vanished.Count == 0 {
		return within + " the process pinned and unpinned nothing that shows: it reuses pinned memory, or registers memory of its own."
	}
	return fmt.Sprintf("%s the process pinned %s (%s) and unpinned %s (%s), %s a second.", within,
		units.Things(c.Appeared.Count, "block", "blocks"), units.Bytes(c.Appeared.Bytes),
		units.Things(c.Vanished.Count, "block", "blocks"), units.Bytes(c.Vanished.Bytes),
		units.Number(float64(c.Appeared.Count+c.Vanished.Count)/max(watched, lookEvery).Seconds(), 2))
}

func processSeries(p *procmem.Process) []result.Series {
	series := []result.Series{}
	add := func(name, key, value string, bytes int) {
		series = append(series, result.Single(name, labelled(key, value), result.Bytes, float64(bytes)))
	}
	smallest, largest := p.Pinned()
	add(processName, kindLabel, "resident", p.Resident)
	add(processName, kindLabel, "pinned_at_least", smallest)
	add(processName, kindLabel, "pinned_at_most", largest)
	for _, k := range []struct {
		name  string
		bytes int
	}{
		{"like_cuda_host_alloc", p.HostAllocated},
		{"hostmem_buffers", p.Buffers},
		{"mlock", p.Locked},
		{"pinned_for_rdma", p.PinnedByKey},
		{"hugetlb", p.Hugetlb},
		{"other_private", p.Private},
	} {
		if k.bytes > 0 {
			add(processName, kindLabel, k.name, k.bytes)
		}
	}
	for i, block := range p.Blocks[:min(len(p.Blocks), shownBlocks)] {
		add(blockName, blockLabel, fmt.Sprint(i+1), block.Size)
	}
	return series
}

func processAnswers(p *procmem.Process) []string {
	var names []string
	for _, f := range p.Frameworks {
		names = append(names, f.Name)
	}
	who := fmt.Sprintf("Process %d (%s)", p.PID, p.Name)
	if len(names) > 0 {
		who += ", which has libraries of " + strings.Join(names, ", ") + ","
	}
	smallest, largest := p.Pinned()
	if !p.Driver && smallest == 0 {
		return []string{who + " pins no memory that shows: it has no CUDA driver mapped and no locked memory."}
	}
	amount := "at least " + units.Bytes(smallest)
	if largest > smallest {
		amount = fmt.Sprintf("between %s and %s", units.Bytes(smallest), units.Bytes(largest))
	}
	answers := []string{fmt.Sprintf("%s seems to pin %s of its %s of resident memory.", who, amount, units.Bytes(p.Resident))}
	if !p.Driver {
		return answers
	}
	bytes, blocks, likely := p.Rounded()
	switch {
	case likely:
		answers = append(answers, fmt.Sprintf("The sizes look rounded up to powers of two (a guess): %d of %d blocks above 2 MiB, %s in total. Up to nearly half of it, %s, may be unused.",
			blocks, len(p.Blocks), units.Bytes(bytes), units.Bytes(bytes/2)))
		answers = append(answers, roundingEnds(p)...)
	case len(p.Blocks) > 0:
		answers = append(answers, fmt.Sprintf("The sizes do not look rounded up to powers of two (a guess): %d of %d blocks above 2 MiB are.", blocks, len(p.Blocks)))
	}
	return answers
}

// roundingEnds says which settings would end the rounding, and which are there already.
func roundingEnds(p *procmem.Process) []string {
	var answers []string
	for _, f := range p.Frameworks {
		switch {
		case f.Setting == "":
		case f.Set:
			answers = append(answers, fmt.Sprintf("If %s pins this memory, it was started with the setting that avoids rounding already: its version ignores the setting, or the sizes are below its limit, or they were requested.", f.Name))
		default:
			answers = append(answers, fmt.Sprintf("If %s pins this memory, to avoid rounding: %s", f.Name, f.Setting))
		}
	}
	if len(answers) == 0 {
		answers = append(answers, "The libraries of the process do not show which software pins this memory, so no setting is known that avoids rounding.")
	}
	return answers
}

func processNotes(p *procmem.Process) []string {
	notes := []string{"a reading, not a measurement: nothing in /proc lists pinned memory as such"}
	if p.HostAllocated > 0 {
		notes = append(notes, "memory of cudaHostAlloc is shared anonymous memory (/dev/zero (deleted)); other shared memory of the process would look alike, and a driver that allocates for several requests together would make sizes of its own")
	}
	if p.Driver && p.Private > 0 {
		notes = append(notes, "memory of cudaHostRegister looks like any other (VmLck and VmPin do not count it): all anonymous memory in mappings of a MiB and more is within \"at most\"")
	}
	if p.Locked > 0 {
		notes = append(notes, "memory of mlock stays resident; whether the GPU has direct access to it does not show")
	}
	if p.Environ == nil {
		notes = append(notes, "the environment of the process could not be read, so settings that are there already do not show")
	}
	return notes
}
