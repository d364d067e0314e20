package doctor

import "github.com/gopinned/pinned/cmd/pincheck/internal/hostinfo"

// placesOf returns where the process runs, the nearest first, as remedies differ by it: see package findings. A job of
// Slurm that got no GPU lacks it for that reason, whatever container it is in.
func placesOf(h *hostinfo.Host) (places []string) {
	if h == nil {
		return nil
	}
	job := slurmJob(h)
	if job && h.Env["SLURM_JOB_GPUS"] == "" {
		places = append(places, "slurm")
	}
	if c := h.Virt.Container; c != "" {
		places = append(places, c)
	}
	switch {
	case job:
		places = append(places, "slurm")
	case h.Virt.Container == "" && h.Virt.Unit != "":
		places = append(places, "systemd")
	}
	return places
}
