// Package cudasim simulates a CUDA runtime library, for tests on machines
// without a GPU, as net/http/httptest does for servers.
package cudasim
