//! Tests of the suite itself: a correct backend passes, faulty ones are detected.

mod faulty;
mod places;

use std::sync::Arc;

use faulty::{Fault, FaultyBackend};
use kiln_conformance::{Case, Skip, bit_identical, cases, trials};
use kiln_ops::{Reference, backend_methods};

/// Parts of the names of slow cases, which are others with larger sizes.
const SLOW: [&str; 5] = ["full_size", "many_rows", "several_blocks", "uneven_shares", "/huge/"];

/// Returns the cases that `filter` selects, without slow ones, those without results and those of training, which the
/// faulty backend forwards.
fn quick_cases(filter: impl Fn(&str) -> bool) -> Vec<Case<FaultyBackend>> {
    let quick = |name: &str| !SLOW.iter().any(|slow| name.contains(slow)) && !name.contains("no_rows");
    let quick = |name: &str| quick(name) && !name.starts_with("training/");
    cases()
        .into_iter()
        .filter(|case: &Case<FaultyBackend>| quick(case.name()) && filter(case.name()))
        .collect()
}

/// Returns the selected cases that do not detect the fault.
fn undetected(fault: Fault, filter: impl Fn(&str) -> bool) -> Vec<String> {
    let passed = quick_cases(filter).into_iter().filter(|case| case.check(&FaultyBackend(fault)).is_ok());
    passed.map(|case| case.name().to_owned()).collect()
}

#[track_caller]
fn assert_detected(fault: Fault, names: &[&str]) {
    for name in names {
        let cases = quick_cases(|case| case.starts_with(name));
        let detected = cases.iter().any(|case| case.check(&FaultyBackend(fault)).is_err());
        assert!(detected, "{name} does not detect {fault:?}");
    }
}

#[test]
fn a_correct_backend_passes_every_case() {
    for case in quick_cases(|_| true) {
        assert_eq!(case.check(&FaultyBackend(Fault::None)), Ok(()), "{}", case.name());
    }
}

#[test]
fn names_are_unique_and_every_operation_has_a_case() {
    let mut names: Vec<_> = cases::<Reference>().iter().map(|case| case.name().to_owned()).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
    // The cases of other operations load, download and wait.
    let without_cases = [
        "download",
        "download_async",
        "download_bytes_async",
        "fence",
        "load_conv",
        "load_weight",
        "synchronize",
        "with_deltas",
    ];
    for op in backend_methods!(names).into_iter().filter(|op| !without_cases.contains(op)) {
        assert!(names.iter().any(|name| name.split('/').next() == Some(op)), "no case for {op}");
    }
}

#[test]
fn every_case_checks_the_last_element() {
    assert_eq!(undetected(Fault::LostTail, |case| !case.starts_with("invalid_arguments/")), [""; 0]);
}

#[test]
fn every_case_detects_nan() {
    assert_eq!(undetected(Fault::NotANumber, |case| !case.starts_with("invalid_arguments/")), [""; 0]);
}

#[test]
fn f32_errors_of_a_ten_thousandth_are_detected() {
    // fp8 products accumulate with low precision, whatever the dtype of the result.
    let is_fp8 = |case: &str| case.contains("_fp8/");
    let well_conditioned =
        |case: &str| case.ends_with("/f32") && !case.contains("large_mean") && !is_fp8(case);
    assert_eq!(undetected(Fault::Scaled(1.0001), well_conditioned), [""; 0]);
    assert_eq!(undetected(Fault::Scaled(1.0175), |case| case.ends_with("/f32") && is_fp8(case)), [""; 0]);
}

#[test]
fn bf16_errors_of_two_ulp_are_detected() {
    // Attention in 8 bits has larger ones.
    let is_8bit = |case: &str| case.contains("/eight_bits/");
    assert_eq!(undetected(Fault::Scaled(1.0175), |case| case.ends_with("/bf16") && !is_8bit(case)), [""; 0]);
    assert_eq!(undetected(Fault::Scaled(1.06), |case| case.ends_with("/bf16") && is_8bit(case)), [""; 0]);
}

#[test]
fn wrong_formulas_are_detected() {
    assert_detected(Fault::OnePassVariance, &["group_norm/large_mean/f32", "ada_layer_norm/large_mean/f32"]);
    let scores = ["steep", "all_high", "all_low"].map(|s| format!("attention/scores_{s}"));
    assert_detected(Fault::UnshiftedExp, &scores.each_ref().map(String::as_str));
    assert_detected(Fault::AttendsToPadding, &["attention/causal_over_padding", "attention/row_blocks"]);
    assert_detected(Fault::NotIsolated, &["attention/isolated_rows", "attention/row_blocks"]);
    assert_detected(Fault::InterleavedHeads, &["attention/grouped_heads", "attention/causal_over_padding"]);
    assert_detected(Fault::OtherRopeLayout, &["norm_rope/adjacent", "norm_rope/halves"]);
    assert_detected(Fault::FirstGroup, &["linear_gated_add/side_by_side", "ada_layer_norm/odd_tails"]);
    assert_detected(Fault::DeltasAtZero, &["linear/deltas_bf16/f32", "linear/deltas_f16/bf16"]);
    let cases = ["row_edges/f32", "row_edges/bf16", "slabs_and_bias/bf16", "deltas/f32", "heavy_tailed/bf16"];
    assert_detected(
        Fault::Scale128,
        &cases.map(|case| format!("linear_int8/{case}")).each_ref().map(String::as_str),
    );
    assert_detected(Fault::Scale128, &["linear_split_int8/", "linear_gated_add_int8/side_by_side"]);
    let nvfp4 = [
        "linear_nvfp4/whole_steps",
        "linear_nvfp4/tails",
        "linear_nvfp4/heavy_tailed",
        "linear_nvfp4/deltas",
    ];
    for fault in [Fault::UnroundedNvfp4, Fault::NeighbourScales] {
        assert_detected(fault, &nvfp4);
        assert_detected(
            fault,
            &[
                "linear_split_nvfp4/",
                "linear_gated_add_nvfp4/",
                "ada_linear_swiglu_nvfp4/",
                "ada_linear_split_nvfp4/",
            ],
        );
    }
    assert_detected(Fault::SwappedPadding, &["conv2d/stride_2_far_padding", "conv2d/even_kernel"]);
    assert_detected(Fault::Truncates, &["cast/", "linear/weight_bf16/bf16"]);
    assert_detected(Fault::AlwaysF32, &["linear/weight_bf16/bf16", "add/odd_tails/bf16"]);
    assert_detected(Fault::OtherMessage, &["invalid_arguments/norms"]);
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
fn a_difference_of_one_bit_is_detected() {
    let (correct, wrong) = (FaultyBackend(Fault::None), FaultyBackend(Fault::Scaled(1.000_000_1)));
    let case = quick_cases(|name| name == "affine/odd_tails/f32").pop().unwrap();
    assert_eq!(case.check(&wrong), Ok(()));
    assert_eq!(case.check_bits(&correct, &correct), Ok(()));
    assert!(case.check_bits(&correct, &wrong).unwrap_err().contains("the bytes differ"));
    assert!(case.check_both(&correct, &wrong).unwrap_err().contains("the bytes differ"));
    let backend = Arc::new(Reference::new());
    let trials = bit_identical("threads", &backend, &backend, &[]);
    assert!(trials.iter().any(|trial| trial.name() == "affine/odd_tails/f32::bits_threads"));
}
