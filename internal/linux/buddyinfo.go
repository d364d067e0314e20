package linux

import (
	"io/fs"
	"math"
	"strconv"
	"strings"
)

// FreeBlocks is a line of /proc/buddyinfo: the free memory of a zone, by the size of
// the contiguous blocks that it is in.
type FreeBlocks struct {
	Node NUMANode
	Zone string // "DMA32", "Normal"
	// Counts are numbers of blocks of 1, 2, 4, 8 and so on pages: Counts[9] are blocks of
	// 2 MiB where a page has 4 KiB.
	Counts []int
}

// Pages returns how many free pages are in blocks of 2^order pages and more.
func (b FreeBlocks) Pages(order int) (pages int) {
	for i, n := range b.Counts {
		if i >= order && i < 31 && n <= math.MaxInt>>i {
			pages = sumSizes(pages, n<<i)
		}
	}
	return pages
}

// ReadBuddyinfo reads how fragmented the host's free memory is.
func ReadBuddyinfo(fsys fs.FS) ([]FreeBlocks, error) {
	return read(fsys, "proc/buddyinfo", ParseBuddyinfo)
}

// ParseBuddyinfo parses /proc/buddyinfo: "Node 0, zone   Normal   4  3  2 …".
func ParseBuddyinfo(text string) ([]FreeBlocks, error) {
	return parseLines(text, `"Node 0, zone Normal 4 3 2 …"`, func(line string) (b FreeBlocks, ok bool) {
		fields := strings.Fields(line)
		if len(fields) < 5 || fields[0] != "Node" || fields[2] != "zone" {
			return b, false
		}
		node, err := strconv.ParseUint(strings.TrimSuffix(fields[1], ","), 10, 16)
		b = FreeBlocks{Node: NUMANode(node), Zone: fields[3]}
		for _, field := range fields[4:] {
			n, ok := parseSize(field, 1)
			if !ok {
				return b, false
			}
			b.Counts = append(b.Counts, n)
		}
		return b, err == nil
	})
}
