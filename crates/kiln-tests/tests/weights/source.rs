//! Tensors by name, the cursor, linear layers, fingerprints.

use std::fs;

use crate::common::{file, tensors};
use bytes::Bytes;
use kiln_tensor::{DType, HostLinear, HostTensor, LinearError, LinearWeight, Shape};
use kiln_weights::{Error, WeightSource};

fn source(shapes: &[(&str, &[usize])]) -> WeightSource {
    WeightSource::from_bytes("dir/model.safetensors", tensors(shapes, &[])).unwrap()
}

fn dense(layer: &HostLinear) -> &[HostTensor] {
    match layer.weight() {
        LinearWeight::Dense(dense) => dense,
        other => panic!("expected dense matrices, found {other:?}"),
    }
}

/// One attention block: q, k, v and out, the last with a bias.
fn attention() -> WeightSource {
    source(&[
        ("blocks.0.attn.to_q.weight", &[4, 3]),
        ("blocks.0.attn.to_k.weight", &[2, 3]),
        ("blocks.0.attn.to_v.weight", &[2, 3]),
        ("blocks.0.attn.to_out.0.weight", &[3, 4]),
        ("blocks.0.attn.to_out.0.bias", &[3]),
        ("blocks.0.attn.norm_q.weight", &[2]),
    ])
}

#[test]
fn names_are_sorted_whatever_their_order_in_the_file() {
    let source = source(&[("b", &[1]), ("c", &[1]), ("a.10", &[1]), ("a.9", &[1])]);
    assert_eq!(source.names().collect::<Vec<_>>(), ["a.10", "a.9", "b", "c"]);
    assert!(source.contains("b") && !source.contains("d"));
}

#[test]
fn counts_cover_all_dtypes() {
    let header = r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},
                     "b":{"dtype":"BF16","shape":[2,2],"data_offsets":[12,20]},
                     "c":{"dtype":"F32","shape":[],"data_offsets":[20,24]},
                     "__metadata__":{"format":"pt"}}"#;
    let source = WeightSource::from_bytes("a", file(header, &[0; 24])).unwrap();
    assert_eq!((source.parameters(), source.bytes()), (8, 24));
    assert_eq!(source.dtypes().into_iter().collect::<Vec<_>>(), [(DType::F32, 4), (DType::BF16, 4)]);
    assert_eq!(source.entry("b"), Some((DType::BF16, &Shape::from([2, 2]))));
    assert_eq!(source.entry("__metadata__"), None);
    assert_eq!(source.metadata()["format"], "pt");
}

#[test]
fn tensors_are_views_of_the_file() {
    let data = tensors(&[("a", &[2]), ("b", &[2])], &[]);
    let source = WeightSource::from_bytes("a", data.clone()).unwrap();
    let b = source.tensor("b").unwrap();
    assert_eq!(b.bytes().as_ptr(), data[data.len() - 8..].as_ptr());
    assert_eq!(b.to_f32().unwrap().as_ref(), [2.0, 3.0]);
}

#[test]
fn tensors_of_a_mapped_file_outlive_the_source_and_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    fs::write(&path, tensors(&[("a", &[3])], &[])).unwrap();
    let tensor = WeightSource::open(&path).unwrap().tensor("a").unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(tensor.to_f32().unwrap().as_ref(), [0.0, 1.0, 2.0]);
}

#[test]
fn error_for_a_missing_tensor_has_similar_names() {
    let source = attention();
    let message = |name: &str| source.tensor(name).unwrap_err().to_string();
    assert_eq!(
        message("blocks.0.attn.to_w.weight"),
        "no tensor `blocks.0.attn.to_w.weight` in `dir/model.safetensors`; nearest: `blocks.0.attn.to_k.weight`, \
         `blocks.0.attn.to_q.weight`, `blocks.0.attn.to_v.weight`"
    );
    let prefixed = message("model.blocks.0.attn.norm_q.weight");
    assert!(prefixed.contains("; nearest: `blocks.0.attn.norm_q.weight`"), "{prefixed}");
    assert_eq!(
        message("x_embedder.weight"),
        "no tensor `x_embedder.weight` in `dir/model.safetensors`, nor a similar one among its 6"
    );
}

#[test]
fn cursor_joins_names_with_dots() {
    let source = attention();
    let attn = source.root().at("blocks").at(0).at("attn");
    assert_eq!(attn.name("to_q.weight"), "blocks.0.attn.to_q.weight");
    assert_eq!(attn.name(""), "blocks.0.attn");
    assert_eq!(source.root().name("x"), "x");
    assert!(attn.contains("norm_q.weight") && !attn.contains("norm_k.weight"));
    assert_eq!(attn.source().path(), source.path());
}

#[test]
fn wrong_shape_names_file_tensor_and_both_shapes() {
    let source = attention();
    let e = source.root().at("blocks.0.attn").tensor("norm_q.weight", [128]).unwrap_err();
    assert!(matches!(&e, Error::Shape { found, expected, .. }
        if found.dims() == [2] && expected.dims() == [128]));
    assert_eq!(
        e.to_string(),
        "tensor `blocks.0.attn.norm_q.weight` in `dir/model.safetensors` has shape [2], expected [128]"
    );
}

#[test]
fn linear_has_a_bias_only_if_the_file_has_one() {
    let source = attention();
    let attn = source.root().at("blocks.0.attn");
    let out = attn.linear("to_out.0", 3, 4).unwrap();
    assert_eq!((out.rows(), out.cols(), dense(&out).len()), (3, 4, 1));
    assert_eq!(out.bias().unwrap().to_f32().unwrap().as_ref(), [36.0, 37.0, 38.0]);
    assert!(attn.linear("to_q", 4, 3).unwrap().bias().is_none());
    let here = attn.at("to_q").linear("", 4, 3).unwrap();
    assert_eq!(here.rows(), 4, "an empty leaf is the prefix itself");
    assert!(matches!(attn.linear("to_q", 3, 4), Err(Error::Shape { .. })));
    assert!(matches!(attn.linear("to_w", 3, 4), Err(Error::MissingTensor { .. })));
}

#[test]
fn stacked_linears_share_the_bytes_of_the_file() {
    let source = attention();
    let attn = source.root().at("blocks.0.attn");
    let qkv = attn.linear_stack(&[("to_q", 4), ("to_k", 2), ("to_v", 2)], 3).unwrap();
    assert_eq!((qkv.rows(), qkv.cols(), dense(&qkv).len()), (8, 3, 3));
    let k = source.tensor("blocks.0.attn.to_k.weight").unwrap();
    assert_eq!(dense(&qkv)[1].bytes().as_ptr(), k.bytes().as_ptr());
    let none = attn.linear_stack(&[], 3).unwrap_err();
    assert!(matches!(none, Error::Linear { source: LinearError::NoWeight, .. }), "{none}");
}

#[test]
fn stacked_biases_join_and_must_be_complete() {
    let shapes: [(&str, &[usize]); 4] =
        [("q.weight", &[2, 1]), ("q.bias", &[2]), ("k.weight", &[1, 1]), ("k.bias", &[1])];
    let stacked = |shapes| source(shapes).root().linear_stack(&[("q", 2), ("k", 1)], 1);
    let layer = stacked(&shapes).unwrap();
    assert_eq!(layer.bias().unwrap().to_f32().unwrap().as_ref(), [2.0, 3.0, 5.0]);
    let e = stacked(&shapes[..3]).unwrap_err().to_string();
    assert!(e.starts_with("no tensor `k.bias`"), "{e}");
}

#[test]
fn stacked_linears_of_different_dtypes_become_f32() {
    let header = r#"{"q.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},
                     "k.weight":{"dtype":"BF16","shape":[1,1],"data_offsets":[4,6]}}"#;
    let mut data = 1.5f32.to_le_bytes().to_vec();
    data.extend([0xc0, 0x3f]);
    let source = WeightSource::from_bytes("a", file(header, &data)).unwrap();
    let layer = source.root().linear_stack(&[("q", 1), ("k", 1)], 1).unwrap();
    assert!(dense(&layer).iter().all(|s| s.dtype() == DType::F32 && s.to_f32().unwrap().as_ref() == [1.5]));
}

#[test]
fn fingerprint_is_stable_and_ignores_files_order_and_metadata() {
    let print = |data: Bytes| WeightSource::from_bytes("x", data).unwrap().fingerprint().unwrap();
    let header = |meta: &str, a: &str, b: &str| {
        format!(
            r#"{{{meta}"a":{{"dtype":"U8","shape":[2],"data_offsets":{a}}},
                "b":{{"dtype":"U8","shape":[2],"data_offsets":{b}}}}}"#
        )
    };
    let one = print(file(&header("", "[0,2]", "[2,4]"), &[1, 2, 3, 4]));
    let meta = r#""__metadata__":{"k":"v"},"#;
    let two = print(file(&header(meta, "[2,4]", "[0,2]"), &[3, 4, 1, 2]));
    assert_eq!(one, two);
    // Computed with Python's hashlib from the documentation of `fingerprint`.
    assert_eq!(one, "1a639caf76970408c8ded70ba3952ac5cb59be8d85c38db4927a9bb3d1185f17");
    assert_ne!(one, print(file(&header("", "[0,2]", "[2,4]"), &[1, 2, 3, 5])));
    let renamed = header("", "[0,2]", "[2,4]").replace("\"b\"", "\"c\"");
    assert_ne!(one, print(file(&renamed, &[1, 2, 3, 4])));
    let signed = header("", "[0,2]", "[2,4]").replace("U8", "I8");
    assert_ne!(one, print(file(&signed, &[1, 2, 3, 4])));
}

#[test]
fn fingerprint_samples_large_tensors() {
    let header = r#"{"a":{"dtype":"U8","shape":[200000],"data_offsets":[0,200000]}}"#;
    let print = |changed: usize| {
        let mut data = vec![0; 200_000];
        data[changed] = 1;
        WeightSource::from_bytes("x", file(header, &data)).unwrap().fingerprint().unwrap()
    };
    let unseen = print(30_000);
    assert_eq!(unseen, print(100_000), "between the blocks");
    for seen in [0, 4095, 66_000, 132_000, 199_999] {
        assert_ne!(unseen, print(seen), "byte {seen}");
    }
}

#[test]
fn the_content_hash_covers_every_byte_and_how_it_is_read() {
    let header = r#"{"a":{"dtype":"U8","shape":[200000],"data_offsets":[0,200000]}}"#;
    let hash = |header: &str, changed: usize| {
        let mut data = vec![0; 200_000];
        data[changed] = 1;
        WeightSource::from_bytes("x", file(header, &data)).unwrap().content_hash()
    };
    let one = hash(header, 30_000);
    assert_eq!(one, hash(header, 30_000));
    assert_ne!(one, hash(header, 100_000), "a byte that no fingerprint covers");
    for other in [
        header.replace("\"a\"", "\"b\""),
        header.replace("U8", "I8"),
        header.replace("[200000],", "[2,100000],"),
    ] {
        assert_ne!(one, hash(&other, 30_000), "{other}");
    }
    let meta = header.replacen('{', r#"{"__metadata__":{"k":"v"},"#, 1);
    assert_eq!(one, hash(&meta, 30_000));
}

#[test]
fn a_subtree_has_its_tensors_under_shorter_names() {
    let whole = source(&[("vae.a.weight", &[2]), ("vae.b", &[3]), ("vaes.c", &[1]), ("text.a.weight", &[4])]);
    let vae = whole.subtree("vae").unwrap();
    assert_eq!(vae.names().collect::<Vec<_>>(), ["a.weight", "b"]);
    assert_eq!(vae.tensor("b").unwrap(), whole.tensor("vae.b").unwrap());
    assert!(whole.subtree("unet").is_none());
}

fn int8(scale_shape: &str, scales: &[f32]) -> WeightSource {
    let header = format!(
        r#"{{"w":{{"dtype":"I8","shape":[2,2],"data_offsets":[0,4]}},
            "w_scale":{{"dtype":"F32","shape":{scale_shape},"data_offsets":[4,{}]}}}}"#,
        4 + 4 * scales.len()
    );
    let mut data = vec![1, 255, 127, 128];
    data.extend(scales.iter().flat_map(|s| s.to_le_bytes()));
    WeightSource::from_bytes("packed.safetensors", file(&header, &data)).unwrap()
}

#[test]
fn int8_rows_are_dequantized() {
    let source = int8("[2]", &[0.5, 2.0]);
    assert_eq!(source.parameters(), 4, "scales are not parameters");
    let tensor = source.root().tensor("w", [2, 2]).unwrap();
    assert_eq!(tensor.dtype(), DType::F32);
    assert_eq!(tensor.to_f32().unwrap().as_ref(), [0.5, -0.5, 254.0, -256.0]);
}

#[test]
fn scales_must_fit_the_rows() {
    let e = int8("[3]", &[1.0, 2.0, 3.0]).tensor("w").unwrap_err().to_string();
    assert!(e.contains("w_scale") && e.contains("[3]") && e.contains("[2]"), "{e}");
}
