package main

import (
	"math"
	"slices"
)

// spread is how values lie, in milliseconds.
type spread struct {
	P50  float64 `json:"p50"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
}

// spreadOf sorts values in place.
func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{}
	}
	slices.Sort(values)
	at := func(q float64) float64 {
		rank := int(math.Ceil(q*float64(len(values)))) - 1
		return math.Round(values[max(rank, 0)]*1000) / 1000
	}
	return spread{at(0.5), at(0.99), at(0.999), at(1)}
}
