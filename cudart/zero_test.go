package cudart_test

import (
	"context"
	"fmt"
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gopinned/pinned/cudart"
	"github.com/gopinned/pinned/cudart/cudasim"
	"github.com/gopinned/pinned/internal/testgpu"
)

// withoutError are the methods that return nil for nil and for zero values: there is nothing
// to close, or to free.
var withoutError = map[string]bool{"Close": true, "Free": true, "FreeHost": true, "Err": true, "Unwrap": true}

// creates are methods whose arguments may be zero values, and whose result is to be closed.
var creates = map[string]bool{"NewStream": true, "NewEvent": true, "StreamFromHandle": true}

// inTests are methods that only the tests have.
var inTests = map[string]bool{"PendingError": true, "Drains": true, "NewBlockingEvent": true, "WaitInC": true, "CloseEvent": true, "Waiting": true, "Polling": true}

// Every exported method of every type of the package returns on nil and on zero values, with
// an error if it returns one. Arguments are zero values, too, but for contexts.
func TestMethodsOfNilAndZeroValuesReturnErrors(t *testing.T) {
	t.Parallel()
	for _, value := range []any{
		(*cudart.Runtime)(nil), new(cudart.Runtime),
		(*cudart.Device)(nil), new(cudart.Device),
		(*cudart.Stream)(nil), new(cudart.Stream),
		(*cudart.Event)(nil), new(cudart.Event),
		(*cudart.DeviceMemory)(nil), new(cudart.DeviceMemory),
		(*cudart.CopyBatch)(nil), new(cudart.CopyBatch),
		cudart.Point{}, cudart.Location{}, cudart.StuckCall{},
		cudart.Code(0), cudart.Version(0), cudart.DevPtr(0), cudart.MemoryType(0), cudart.DriverFacts{},
		new(cudart.Error), new(cudart.OpenError),
	} {
		callAll(t, value, func(reflect.Type) reflect.Value { return reflect.Value{} })
	}
}

// The same for nil and zero arguments of methods of values that are whole: none panics.
func TestZeroArgumentsDoNotPanic(t *testing.T) {
	t.Parallel()
	_, rt := testgpu.Sim(t, cudasim.Config{})
	dev, err := rt.Device(0)
	require.NoError(t, err)
	s := stream(t, dev)
	e := event(t, dev)
	for _, value := range []any{rt, dev, s, e, s.Point(), alloc(t, dev, 64)} {
		for _, zero := range []bool{false, true} { // nil, or pointers to zero values
			callAll(t, value, func(p reflect.Type) reflect.Value {
				if zero && p.Kind() == reflect.Pointer {
					return reflect.New(p.Elem())
				}
				return reflect.Value{}
			})
		}
	}
}

// callAll calls all methods of a value but those that end it.
func callAll(t *testing.T, value any, argument func(reflect.Type) reflect.Value) {
	v := reflect.ValueOf(value)
	isZero := v.IsZero() || v.Kind() == reflect.Pointer && v.Elem().IsZero()
	for i := range v.NumMethod() {
		method, call := v.Type().Method(i), v.Method(i)
		what := fmt.Sprintf("%T(%v).%s", value, isZero, method.Name)
		if method.Name == "Format" || inTests[method.Name] || !isZero && method.Name == "Close" {
			continue
		}
		args := make([]reflect.Value, call.Type().NumIn())
		for j := range args {
			in := call.Type().In(j)
			switch args[j] = argument(in); {
			case args[j].IsValid():
			case in == reflect.TypeFor[context.Context]():
				args[j] = reflect.ValueOf(t.Context())
			default:
				args[j] = reflect.Zero(in)
			}
		}
		var results []reflect.Value
		if !assert.NotPanics(t, func() { results = call.Call(args) }, what) {
			continue
		}
		if creates[method.Name] && !isZero {
			assert.NoError(t, results[0].Interface().(interface{ Close() error }).Close(), what)
		}
		if !isZero || withoutError[method.Name] {
			continue
		}
		if n := len(results); n > 0 && results[n-1].Type() == reflect.TypeFor[error]() && v.Kind() == reflect.Pointer {
			assert.False(t, results[n-1].IsNil(), "%s returned no error", what)
		}
	}
}
