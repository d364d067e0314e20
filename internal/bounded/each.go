package bounded

import (
	"runtime"
	"sync"
	"weak"
)

// An Each has a V for each object of type K, such as a Group for each device, for as long as
// the object exists. The zero Each is ready.
type Each[K, V any] struct{ values sync.Map } // of *V, by weak.Pointer[K]

// Of returns the V of an object, always the same; a zero V at first.
func (e *Each[K, V]) Of(object *K) *V {
	key := weak.Make(object)
	v, ok := e.values.Load(key)
	if !ok {
		if v, ok = e.values.LoadOrStore(key, new(V)); !ok {
			runtime.AddCleanup(object, func(key weak.Pointer[K]) { e.values.Delete(key) }, key)
		}
	}
	return v.(*V)
}
