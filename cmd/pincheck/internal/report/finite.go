package report

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/gopinned/pinned/cmd/pincheck/internal/result"
	"github.com/gopinned/pinned/internal/units"
)

// finite returns a copy of a result without numbers that are not finite, which JSON cannot
// hold: samples and optional numbers are left out, others are 0. An error in the copy says
// how many they were. Text is valid UTF-8, labels of one
// key count once, and no list is nil, so that none is null in JSON.
func finite(r *Result) *Result {
	left := 0
	r = copyFinite(reflect.ValueOf(r), &left).Interface().(*Result)
	if left > 0 {
		r.Errors = append(r.Errors, fmt.Sprintf("%s not finite and left out", units.Things(left, "number was", "numbers were")))
	}
	for i := range r.Benches {
		for j := range r.Benches[i].Series {
			if s := &r.Benches[i].Series[j]; s.Expected != nil && s.Expected.Value == 0 {
				s.Expected = nil
			}
		}
	}
	return r
}

var timeType = reflect.TypeFor[time.Time]()

// isFinite reports whether v is neither infinite nor NaN, which JSON cannot have.
func isFinite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// isLabel reports whether v is one of result.Labels, whose keys are those of an object.
func isLabel(v reflect.Value) bool { return v.Type() == reflect.TypeFor[result.Label]() }

// contains reports whether labels have one with the key of label.
func contains(labels, label reflect.Value) bool {
	return slices.ContainsFunc(labels.Interface().(result.Labels), func(l result.Label) bool { return l.Key == label.Interface().(result.Label).Key })
}

// copyFinite copies what JSON shows of a value. Interfaces are not entered.
func copyFinite(v reflect.Value, left *int) reflect.Value {
	out := reflect.New(v.Type()).Elem()
	out.Set(v)
	switch v.Kind() {
	case reflect.Float64:
		if !isFinite(v.Float()) {
			*left++
			out.SetFloat(0)
		}
	case reflect.Pointer:
		switch {
		case v.IsNil():
		case v.Type().Elem().Kind() != reflect.Float64:
			out = reflect.New(v.Type().Elem())
			out.Elem().Set(copyFinite(v.Elem(), left))
		case !isFinite(v.Elem().Float()):
			*left++
			out.SetZero()
		}
	case reflect.String:
		out.SetString(strings.ToValidUTF8(v.String(), "�"))
	case reflect.Slice:
		out.Set(copyList(v, left))
	case reflect.Struct:
		if v.Type() == timeType {
			break
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				out.Field(i).Set(copyFinite(v.Field(i), left))
			}
		}
	}
	return out
}

// copyList is copyFinite of a list, without the numbers that are not finite.
func copyList(v reflect.Value, left *int) reflect.Value {
	out := reflect.MakeSlice(v.Type(), 0, v.Len())
	for i := range v.Len() {
		if e := v.Index(i); e.Kind() == reflect.Float64 && !isFinite(e.Float()) {
			*left++
		} else if e = copyFinite(e, left); !isLabel(e) || !contains(out, e) {
			out = reflect.Append(out, e)
		}
	}
	return out
}
