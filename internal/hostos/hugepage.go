package hostos

// HugePage is the size of a huge page on amd64 and most of arm64.
const HugePage = 2 << 20
