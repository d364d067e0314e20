package findings

import (
	"cmp"
	_ "embed"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Where a process runs decides how it gets what it lacks. A page writes a need in braces, such as {gpu}, and a remedy
// has the words of the place: hostinfo's Places has the names. The first place of a host that has words for a need
// counts, then the words for any known place ("*"), then the general ones (""), which the page itself has.
//
// Commands of the host, which need root there, are written as on a machine of one's own (`sudo modprobe nvidia`):
// see owners.
type words struct{ places, do string } // places are joined by ", "

// Places that share words.
const (
	rented  = "colab, kaggle, sagemaker, paperspace, runpod, vast" // by services: no user of them reaches the host
	podmans = "podman, podman without root"
	dockers = "docker, docker desktop, docker on jetson"
)

//go:embed places.txt
var placesText string

var sharedPlaces = strings.NewReplacer("$rented", rented, "$podmans", podmans, "$dockers", dockers)

// needs returns the rows of places.txt by need.
var needs = sync.OnceValue(func() map[string][]words {
	all := map[string][]words{}
	for need, line := range sections(placesText) {
		places, do, _ := strings.Cut(line, ": ")
		all[need] = append(all[need], words{strings.TrimPrefix(sharedPlaces.Replace(places), "-"), do})
	}
	return all
})

var need = regexp.MustCompile(`\{([a-z ]+)\}`)

// at returns a text with the words of the first of the places that has some, for each need, and says of commands of
// the host who can run them.
func at(text string, places []string) string {
	if !strings.ContainsAny(text, "{`") {
		return text
	}
	text = need.ReplaceAllStringFunc(text, func(braced string) string {
		rows := byPlace()[braced[1:len(braced)-1]]
		for _, place := range withRest(places) {
			if do := rows[place]; do != "" {
				return do
			}
		}
		return braced // a page of another need is an error of parse
	})
	return byOwner(text, places)
}

// byPlace returns the words for each need by place. The places that any need has words for are those of need "".
var byPlace = sync.OnceValue(func() map[string]map[string]string {
	known := map[string]string{}
	all := map[string]map[string]string{"": known}
	for name, rows := range needs() {
		all[name] = map[string]string{}
		for _, row := range rows {
			for place := range strings.SplitSeq(row.places, ", ") {
				all[name][place] = cmp.Or(all[name][place], row.do)
				known[place] = place
			}
		}
	}
	return all
})

// withRest returns the places in the order in which they count, with what counts after them.
func withRest(places []string) []string {
	if slices.ContainsFunc(places, func(place string) bool { return byPlace()[""][place] != "" }) {
		return append(slices.Clone(places), "*", "")
	}
	return append(slices.Clone(places), "")
}

// owners are who can run a command of the host for a process in a place. The commands keep their sudo where the user
// may have it.
var owners = []owner{
	{rented, "needs the operator of the service", false},
	{"kubernetes, slurm, apptainer, enroot", "needs an administrator of the node", false},
	{dockers + ", " + podmans + ", toolbox, distrobox, lxc, flatpak, containerd, container, gvisor, systemd-nspawn", "on the host", true},
}

// hostCommand matches a command of the host in code quotes, with the colon before it.
var hostCommand = regexp.MustCompile("(:?) ?`((?:[^`]*\\bsudo |systemctl |runsc |nvidia-cuda-mps-control|echo \\w+ \\| nvidia-cuda)[^`]*)`")

// An owner is who can run a command of the host.
type owner struct {
	places, who string
	sudo        bool
}

func ownerOf(places []string) *owner {
	for i, o := range owners {
		for place := range strings.SplitSeq(o.places, ", ") {
			if slices.Contains(places, place) {
				return &owners[i]
			}
		}
	}
	return nil
}

// byOwner says of each command of the host who can run it, where that is not the reader.
func byOwner(text string, places []string) string {
	o := ownerOf(places)
	if o == nil {
		return text
	}
	var out strings.Builder
	last := 0
	for _, m := range hostCommand.FindAllStringSubmatchIndex(text, -1) {
		out.WriteString(text[last:m[0]])
		command := text[m[4]:m[5]]
		if !o.sudo {
			command = strings.ReplaceAll(command, "sudo ", "")
		}
		before := out.String()
		if sentence := before[strings.LastIndex(before, ". ")+1:]; !o.sudo || !strings.Contains(sentence, "on the host") {
			out.WriteString(" (" + o.who + ")")
		}
		out.WriteString(text[m[2]:m[3]] + " `" + command + "`")
		last = m[1]
	}
	return out.String() + text[last:]
}
