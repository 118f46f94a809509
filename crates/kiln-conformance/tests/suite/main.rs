//! The suite itself: it lets a right backend pass and notices wrong ones.

mod faulty;

use std::sync::Arc;

use faulty::{Fault, Faulty};
use kiln_conformance::{Case, Skip, bit_identical, cases, trials};
use kiln_ops::Reference;

/// The cases of a kind, without those that take long and look for nothing else.
fn quick_cases(kind: impl Fn(&str) -> bool) -> Vec<Case<Faulty>> {
    let quick = |name: &str| !name.contains("full_size") && !name.contains("no_rows");
    cases().into_iter().filter(|case: &Case<Faulty>| quick(case.name()) && kind(case.name())).collect()
}

/// The cases of a kind that let the fault pass.
fn blind(fault: Fault, kind: impl Fn(&str) -> bool) -> Vec<String> {
    let passed = quick_cases(kind).into_iter().filter(|case| case.check(&Faulty(fault)).is_ok());
    passed.map(|case| case.name().to_owned()).collect()
}

#[track_caller]
fn noticed_by(fault: Fault, names: &[&str]) {
    for name in names {
        let cases = quick_cases(|case| case.starts_with(name));
        let noticed = cases.iter().any(|case| case.check(&Faulty(fault)).is_err());
        assert!(noticed, "{name} does not notice {fault:?}");
    }
}

#[test]
fn a_backend_that_only_rounds_passes_every_case() {
    for case in cases() {
        assert_eq!(case.check(&Faulty(Fault::None)), Ok(()), "{}", case.name());
    }
}

#[test]
fn names_are_unique_and_name_an_operation() {
    let mut names: Vec<_> = cases::<Reference>().iter().map(|case| case.name().to_owned()).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    for op in [
        "upload",
        "download_bytes",
        "reshape",
        "cast",
        "slice_rows",
        "concat_rows",
        "concat_columns",
        "linear",
        "linear_split",
        "linear_gated_add",
        "swiglu_gated_add",
        "ada_layer_norm",
        "ada_linear_split",
        "rms_norm",
        "norm_rope",
        "qk_norm_rope",
        "attention",
        "swiglu",
        "activation",
        "add",
        "add_scaled",
        "lerp",
        "guide",
        "blend_rows",
        "affine",
        "space_to_depth",
        "depth_to_space",
        "group_norm",
        "conv2d",
    ] {
        assert!(names.iter().any(|name| name.split('/').next() == Some(op)), "no case for {op}");
    }
}

#[test]
fn every_case_looks_at_the_last_element() {
    assert_eq!(blind(Fault::LostTail, |case| !case.starts_with("refusals/")), [""; 0]);
}

#[test]
fn no_case_lets_a_nan_pass() {
    assert_eq!(blind(Fault::NotANumber, |case| !case.starts_with("refusals/")), [""; 0]);
}

#[test]
fn f32_errors_of_a_ten_thousandth_are_noticed() {
    // Sums of 8-bit floats are short, whatever the type of the result.
    let short = |case: &str| case.contains("_fp8/");
    let well_conditioned =
        |case: &str| case.ends_with("/f32") && !case.contains("large_mean") && !short(case);
    assert_eq!(blind(Fault::Scaled(1.0001), well_conditioned), [""; 0]);
    assert_eq!(blind(Fault::Scaled(1.0175), |case| case.ends_with("/f32") && short(case)), [""; 0]);
}

#[test]
fn bf16_errors_of_two_units_are_noticed() {
    assert_eq!(blind(Fault::Scaled(1.0175), |case| case.ends_with("/bf16")), [""; 0]);
}

#[test]
fn wrong_formulas_are_noticed() {
    noticed_by(Fault::OnePassVariance, &["group_norm/large_mean/f32", "ada_layer_norm/large_mean/f32"]);
    let scores = ["steep", "all_high", "all_low"].map(|s| format!("attention/scores_{s}"));
    noticed_by(Fault::PlainExp, &scores.each_ref().map(String::as_str));
    noticed_by(Fault::SeesPadding, &["attention/causal_over_padding", "attention/row_blocks"]);
    noticed_by(Fault::NotIsolated, &["attention/isolated_rows", "attention/row_blocks"]);
    noticed_by(Fault::InterleavedHeads, &["attention/grouped_heads", "attention/causal_over_padding"]);
    noticed_by(Fault::OtherPairs, &["norm_rope/adjacent", "norm_rope/halves"]);
    noticed_by(Fault::FirstGroup, &["linear_gated_add/side_by_side", "ada_layer_norm/odd_tails"]);
    noticed_by(Fault::DeltasAtZero, &["linear/deltas_bf16/f32", "linear/deltas_f16/bf16"]);
    let whole = ["row_edges/f32", "row_edges/bf16", "slabs_and_bias/bf16", "deltas/f32", "heavy_tailed/bf16"];
    noticed_by(
        Fault::Scale128,
        &whole.map(|case| format!("linear_int8/{case}")).each_ref().map(String::as_str),
    );
    noticed_by(Fault::Scale128, &["linear_split_int8/", "linear_gated_add_int8/side_by_side"]);
    noticed_by(Fault::NearPadding, &["conv2d/stride_2_far_padding", "conv2d/even_kernel"]);
    noticed_by(Fault::Truncates, &["cast/", "linear/weight_bf16/bf16"]);
    noticed_by(Fault::AlwaysF32, &["linear/weight_bf16/bf16", "add/odd_tails/bf16"]);
    noticed_by(Fault::OwnWords, &["refusals/norms"]);
}

#[test]
fn skips_are_ignored_and_stale_ones_fail() {
    let backend = Arc::new(Reference::new());
    let skips = [
        Skip { cases: "rms_norm/", reason: "no square roots here" },
        Skip { cases: "fourier/", reason: "not yet" },
    ];
    let trials = trials("here", &backend, &skips);
    let find = |name: &str| trials.iter().find(|trial| trial.name() == name).unwrap();
    let skipped = find("rms_norm/tiny/f32::here");
    assert!(skipped.has_ignored_flag());
    assert_eq!(skipped.kind(), "no square roots here");
    assert!(!find("swiglu/tiny/f32::here").has_ignored_flag());
    assert!(!find("skips/fourier/::here").has_ignored_flag());
}

#[test]
fn two_backends_that_differ_in_a_bit_are_told_apart() {
    let (right, wrong) = (Faulty(Fault::None), Faulty(Fault::Scaled(1.000_000_1)));
    let case = quick_cases(|name| name == "affine/odd_tails/f32").pop().unwrap();
    assert_eq!(case.check(&wrong), Ok(()));
    assert_eq!(case.check_bits(&right, &right), Ok(()));
    assert!(case.check_bits(&right, &wrong).unwrap_err().contains("the bytes differ"));
    let backend = Arc::new(Reference::new());
    let trials = bit_identical("threads", &backend, &backend, &[]);
    assert!(trials.iter().any(|trial| trial.name() == "affine/odd_tails/f32::bits_threads"));
}
