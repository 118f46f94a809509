//! Tests of `kiln-tensor`, `kiln-conformance`, `kiln-cpu` and `kiln-weights`.
//!
//! Cargo builds the tests of a crate with the crate's own optimization. These four are optimized in the tests' build, and
//! optimizing their tests takes longer than it saves: so the tests live here, beside one about the layers of crates.
