//! One test for each way in which a safetensors file can be malformed.

use std::fs;

use crate::common::file;
use bytes::Bytes;
use kiln_tensor::DType;
use kiln_weights::{Error, MalformedFile, WeightSource};

/// The error for a file of these bytes, without the file's name.
fn open_error(data: Bytes) -> String {
    let message = WeightSource::from_bytes("dir/a.safetensors", data).unwrap_err().to_string();
    let start = "`dir/a.safetensors` is not a valid safetensors file: ";
    message.strip_prefix(start).unwrap_or_else(|| panic!("no file name: {message}")).to_owned()
}

fn header_error(header: &str, data_len: usize) -> String {
    open_error(file(header, &vec![0; data_len]))
}

#[test]
fn missing_file_is_named() {
    let e = WeightSource::open("no/such/model.safetensors").unwrap_err();
    assert_eq!(e.to_string(), "there is no file or folder `no/such/model.safetensors`");
}

#[test]
fn empty_file_is_an_error_in_memory_and_on_disk() {
    assert_eq!(open_error(Bytes::new()), "the file is empty");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    fs::write(&path, "").unwrap();
    let e = WeightSource::open(&path).unwrap_err();
    assert!(matches!(e, Error::Malformed { problem: MalformedFile::Empty, .. }), "{e}");
}

#[cfg(unix)]
#[test]
fn device_is_not_read_as_a_file() {
    let e = WeightSource::open("/dev/null").unwrap_err();
    assert_eq!(e.to_string(), "`/dev/null` is not a regular file");
}

#[test]
fn file_shorter_than_the_length_field_is_an_error() {
    let message = open_error(Bytes::from_static(&[2, 0, 0, 0, 0, 0, 0]));
    assert_eq!(message, "expected at least 8 bytes (the header's length), found 7");
}

#[test]
fn header_length_beyond_the_file_is_an_error() {
    let mut data = 100u64.to_le_bytes().to_vec();
    data.extend(b"{}");
    assert_eq!(
        open_error(data.into()),
        "it announces a header of 100 bytes, but has 2 bytes after that number"
    );
}

#[test]
fn huge_header_length_is_an_error() {
    for length in [100_000_001, u64::MAX, u64::MAX - 7] {
        let mut data = length.to_le_bytes().to_vec();
        data.extend(b"{}");
        let expected = format!(
            "it announces a header of {length} bytes, more than the 100000000 that the format allows"
        );
        assert_eq!(open_error(data.into()), expected);
    }
}

#[test]
fn header_that_is_not_json_is_an_error() {
    for header in ["", "nonsense", "{\"a\":", "[]", "7", "{} {}", "\u{0}"] {
        let message = header_error(header, 0);
        assert!(message.starts_with("its header is not JSON of tensors: "), "{header}: {message}");
    }
    let not_text = [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat();
    assert!(open_error(not_text.into()).starts_with("its header is not JSON of tensors: "));
}

#[test]
fn deeply_nested_header_is_an_error() {
    let header = format!(r#"{{"a":{}"#, "[".repeat(100_000));
    assert!(header_error(&header, 0).starts_with("its header is not JSON of tensors: "));
}

#[test]
fn entry_of_the_wrong_kind_names_its_tensor() {
    for entry in [
        "7",
        "null",
        r#"{"dtype":"F32","shape":[1]}"#,
        r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#,
        r#"{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4]}"#,
    ] {
        let message = header_error(&format!(r#"{{"some.weight":{entry}}}"#), 4);
        assert!(message.contains("tensor `some.weight`: "), "{entry}: {message}");
    }
}

#[test]
fn metadata_values_must_be_strings() {
    let message = header_error(r#"{"__metadata__":{"n":1}}"#, 0);
    assert!(message.starts_with("its header is not JSON of tensors: "), "{message}");
    assert!(WeightSource::from_bytes("a", file(r#"{"__metadata__":null}"#, &[])).is_ok());
}

#[test]
fn overlapping_tensors_are_an_error() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                     "b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    assert_eq!(
        header_error(header, 8),
        "the data of tensor `b` starts at byte 4, inside `a`, which ends at 8"
    );
}

#[test]
fn gap_between_tensors_is_an_error() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
                     "b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;
    assert_eq!(
        header_error(header, 12),
        "the data of tensor `b` starts at byte 8, expected 4: the bytes between belong to no tensor"
    );
}

#[test]
fn reversed_offsets_are_an_error() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#;
    assert_eq!(header_error(header, 4), "the data of tensor `a` ends at byte 0, before its start at 4");
}

#[test]
fn offsets_beyond_the_file_are_an_error() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                     "b":{"dtype":"U8","shape":[96],"data_offsets":[4,100]}}"#;
    assert_eq!(
        header_error(header, 10),
        "its header describes 100 bytes of data, found 10: the file ends inside or before `b`; it was probably \
         not downloaded completely"
    );
}

#[test]
fn truncated_data_is_an_error_at_every_length() {
    let whole = crate::common::tensors(&[("a", &[3]), ("b", &[2, 2])], &[]);
    assert!(WeightSource::from_bytes("a", whole.clone()).is_ok());
    for length in 0..whole.len() {
        assert!(WeightSource::from_bytes("a", whole.slice(..length)).is_err(), "{length} bytes");
    }
    assert!(
        open_error(whole.slice(..whole.len() - 20))
            .contains("28 bytes of data, found 8: the file ends inside or before `a`")
    );
}

#[test]
fn bytes_after_the_last_tensor_are_an_error() {
    let header = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    assert_eq!(
        header_error(header, 6),
        "its header describes 4 bytes of data, found 6: the rest belongs to no tensor"
    );
}

#[test]
fn shape_that_needs_another_length_is_an_error() {
    let header = r#"{"a":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,24]}}"#;
    assert_eq!(header_error(header, 24), "tensor `a`, BF16 [3, 2], needs 12 bytes, but its offsets span 24");
}

#[test]
fn shape_that_overflows_is_an_error() {
    for shape in ["4294967296,4294967296", "18446744073709551615,2,0", "2305843009213693952"] {
        let header = format!(r#"{{"a":{{"dtype":"F64","shape":[{shape}],"data_offsets":[0,8]}}}}"#);
        let message = header_error(&header, 8);
        assert!(message.starts_with("tensor `a` has shape ["), "{message}");
        assert!(message.ends_with("which is too large for any memory"), "{message}");
    }
}

#[test]
fn empty_tensor_of_huge_size_is_an_error() {
    let header = r#"{"a":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}"#;
    let message = header_error(header, 0);
    assert!(message.contains("`a` has shape [0, 4611686018427387904]: no elements"), "{message}");
}

#[test]
fn offsets_whose_sum_overflows_are_an_error() {
    // Eight tensors that fill the address space: adding the header's length to their end wraps around.
    let step = (1u64 << 61) - 1;
    let entry = |i: u64| {
        let (start, end) = (i * step, (i + 1) * step);
        format!(r#""t{i}":{{"dtype":"U8","shape":[{step}],"data_offsets":[{start},{end}]}}"#)
    };
    let header = format!("{{{}}}", (0..8).map(entry).collect::<Vec<_>>().join(","));
    let message = header_error(&header, 8);
    assert!(
        message.starts_with("its header describes 18446744073709551608 bytes of data, found 8"),
        "{message}"
    );
}

#[test]
fn unsupported_dtype_is_named_with_its_tensor() {
    for dtype in ["F4", "U64", "Q4_K", ""] {
        let header = format!(r#"{{"a.weight":{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,8]}}}}"#);
        assert_eq!(
            header_error(&header, 8),
            format!(
                "tensor `a.weight` has dtype {dtype}; Kiln reads F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, \
                 I32, I8, U8, BOOL"
            )
        );
    }
}

#[test]
fn name_given_twice_is_an_error() {
    let header = r#"{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},
                     "a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}"#;
    assert_eq!(header_error(header, 8), "its header names tensor `a` twice");
}

#[test]
fn files_of_other_formats_are_recognized() {
    for (start, expected) in [
        (&b"version https://git-lfs.github.com/spec/v1\noid sha256:00"[..], "it is a Git LFS pointer; fetch"),
        (b"GGUF\x03\0\0\0\0\0\0\0", "its header needs 8 bytes at byte 8, where 4 are left"),
        (b"PK\x03\x04\0\0\0\0\0\0\0\0", "it is a zip archive"),
        (b"\x80\x02}q\0XaX\0\0\0\0", "it is a Python pickle"),
        (b"<!DOCTYPE html><html>", "it is an HTML page"),
        (b"none\n", "it is a text file"),
        (b"{}", "it is a JSON text"),
    ] {
        let message = open_error(Bytes::from_static(start));
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn scalars_and_empty_tensors_are_valid() {
    let header = r#"{"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},
                     "z":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]},
                     "y":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}"#;
    let source = WeightSource::from_bytes("a", file(header, &[7, 0, 0, 0, 0, 0, 0, 0])).unwrap();
    assert_eq!(source.tensor("s").unwrap().to_i64().unwrap(), [7]);
    assert_eq!(source.tensor("z").unwrap().numel(), 0);
    assert_eq!(source.dtypes().into_iter().collect::<Vec<_>>(), [(DType::F32, 0), (DType::I64, 1)]);
}
