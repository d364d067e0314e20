package stage

// How many workers a copy keeps busy, besides its own goroutine, for each device:
// copying into the ring takes twice the cores of copying past the caches, out of it or,
// for a small upload, into it; and reading or faulting in the page cache three times.
// Uploads to several devices at once take more for each, because a worker gets less of
// the memory's bandwidth then.
const upHelpers, pastHelpers, kernelHelpers, severalHelpers = 7, 4, 9, 11

// manyCopies is how many copies at once on a device keep its link busy by themselves.
const manyCopies = 4

// way is the direction of a copy.
func (j *Job) way() class { return classOf(j.Down, false) }

// demand makes known whether the job has something to copy: others on its devices
// leave it a share of the workers then. A job whose reader or writer is slow has
// nothing meanwhile.
func (j *Job) demand(some bool) {
	if some == j.demands {
		return
	}
	j.demands = some
	way := j.way()
	for _, s := range j.Over {
		switch {
		case some && s.copies[way].Add(1) == 1:
			s.crew.devices[way].Add(1)
		case !some && s.copies[way].Add(-1) == 0:
			s.crew.devices[way].Add(-1)
		}
	}
}

// limitOf is how many workers a job may have: what its devices take, divided by the
// copies that there are. Many copies at once need none, as their own goroutines are
// enough.
func (c *crew) limitOf(j *Job) int32 {
	if j.Workers > 0 {
		return int32(j.Workers) - 1
	}
	limit, way := j.limit, j.way()
	if way == classUp && c.devices[way].Load() > 1 {
		limit = max(limit, severalHelpers)
	}
	limit *= j.devices
	return min(limit, (limit+j.devices)/max(j.Over[0].copies[way].Load(), 1))
}
