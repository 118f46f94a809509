//! The functions through which kernels read and write tensors.
//!
//! WGSL has no bf16: a bf16 tensor is an array of words with two elements each, the first in the low half. Rows may have an odd
//! length and views may start at an odd element, so that two invocations may each have to write one half of a word. Halves are
//! written with atomics, whole words at once; so kernels write pairs of neighbours (`write2_y`) where they can.
//!
//! For a tensor `x` there are, with an index counted from the start of the tensor:
//!
//! - `read_x(i)`, `read2_x(i)`, `read4_x(i)`: one, two and four elements as f32.
//! - `bits_x(i)`: the bits of an element, for kernels that only move values.
//! - `write_y(i, value)`, `write2_y(i, pair, count)`: one element, or the first `count` of a pair.
//! - `write_bits_y(i, bits)`, `write2_bits_y(i, pair)`: the counterparts of `bits_x`.
//!
//! A tensor of `words` has `word_x(i)`, and `write_word_y(i, word)`.

/// How a kernel uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// What all kernels share.
pub(super) const SHARED: &str = "
fn round_bf16(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (bits >> 16u) | 0x40u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}
";

/// The binding and the accessors of a tensor.
pub(super) fn of(name: &str, kind: &str, access: Access, binding: usize) -> Result<String, String> {
    let (mode, element) = match (access, kind) {
        (Access::Read, _) => ("read", "u32"),
        (Access::Write, "bf16") => ("read_write", "atomic<u32>"),
        (Access::Write, _) => ("read_write", "u32"),
    };
    let template = match (access, kind) {
        (Access::Read, "f32") => READ_F32,
        (Access::Read, "bf16") => READ_BF16,
        (Access::Read, "words") => READ_WORDS,
        (Access::Write, "f32") => WRITE_F32,
        (Access::Write, "bf16") => WRITE_BF16,
        (Access::Write, "words") => WRITE_WORDS,
        _ => return Err(format!("`{name}` has the unknown type `{kind}`")),
    };
    let binding =
        format!("@group(0) @binding({binding}) var<storage, {mode}> NAME_words: array<{element}>;\n");
    Ok((binding + template).replace("NAME", name))
}

const READ_F32: &str = "
fn bits_NAME(i: u32) -> u32 {
    return NAME_words[params.NAME_at + i];
}
fn read_NAME(i: u32) -> f32 {
    return bitcast<f32>(NAME_words[params.NAME_at + i]);
}
fn read2_NAME(i: u32) -> vec2<f32> {
    let at = params.NAME_at + i;
    return vec2<f32>(bitcast<f32>(NAME_words[at]), bitcast<f32>(NAME_words[at + 1u]));
}
fn read4_NAME(i: u32) -> vec4<f32> {
    let at = params.NAME_at + i;
    return bitcast<vec4<f32>>(vec4<u32>(NAME_words[at], NAME_words[at + 1u], NAME_words[at + 2u], NAME_words[at + 3u]));
}
";

const READ_BF16: &str = "
fn bits_NAME(i: u32) -> u32 {
    let at = params.NAME_at + i;
    return (NAME_words[at >> 1u] >> ((at & 1u) << 4u)) & 0xffffu;
}
fn read_NAME(i: u32) -> f32 {
    return bitcast<f32>(bits_NAME(i) << 16u);
}
fn read2_NAME(i: u32) -> vec2<f32> {
    let at = params.NAME_at + i;
    let first = NAME_words[at >> 1u];
    if ((at & 1u) == 0u) {
        return bitcast<vec2<f32>>(vec2<u32>(first << 16u, first & 0xffff0000u));
    }
    return bitcast<vec2<f32>>(vec2<u32>(first & 0xffff0000u, NAME_words[(at >> 1u) + 1u] << 16u));
}
fn read4_NAME(i: u32) -> vec4<f32> {
    return vec4<f32>(read2_NAME(i), read2_NAME(i + 2u));
}
";

const READ_WORDS: &str = "
fn word_NAME(i: u32) -> u32 {
    return NAME_words[params.NAME_at + i];
}
";

const WRITE_F32: &str = "
fn read_NAME(i: u32) -> f32 {
    return bitcast<f32>(NAME_words[params.NAME_at + i]);
}
fn write_NAME(i: u32, value: f32) {
    NAME_words[params.NAME_at + i] = bitcast<u32>(value);
}
fn write2_NAME(i: u32, pair: vec2<f32>, count: u32) {
    write_NAME(i, pair.x);
    if (count > 1u) {
        write_NAME(i + 1u, pair.y);
    }
}
fn write_bits_NAME(i: u32, bits: u32) {
    NAME_words[params.NAME_at + i] = bits;
}
fn write2_bits_NAME(i: u32, pair: vec2<u32>) {
    write_bits_NAME(i, pair.x);
    write_bits_NAME(i + 1u, pair.y);
}
";

const WRITE_BF16: &str = "
fn read_NAME(i: u32) -> f32 {
    let at = params.NAME_at + i;
    return bitcast<f32>((atomicLoad(&NAME_words[at >> 1u]) >> ((at & 1u) << 4u)) << 16u);
}
fn write_bits_NAME(i: u32, bits: u32) {
    let at = params.NAME_at + i;
    let shift = (at & 1u) << 4u;
    atomicAnd(&NAME_words[at >> 1u], 0xffff0000u >> shift);
    atomicOr(&NAME_words[at >> 1u], bits << shift);
}
fn write2_bits_NAME(i: u32, pair: vec2<u32>) {
    let at = params.NAME_at + i;
    if ((at & 1u) == 0u) {
        atomicStore(&NAME_words[at >> 1u], pair.x | (pair.y << 16u));
        return;
    }
    write_bits_NAME(i, pair.x);
    write_bits_NAME(i + 1u, pair.y);
}
fn write_NAME(i: u32, value: f32) {
    write_bits_NAME(i, round_bf16(value));
}
fn write2_NAME(i: u32, pair: vec2<f32>, count: u32) {
    let at = params.NAME_at + i;
    if (count > 1u && (at & 1u) == 0u) {
        atomicStore(&NAME_words[at >> 1u], round_bf16(pair.x) | (round_bf16(pair.y) << 16u));
        return;
    }
    write_NAME(i, pair.x);
    if (count > 1u) {
        write_NAME(i + 1u, pair.y);
    }
}
";

const WRITE_WORDS: &str = "
fn read_word_NAME(i: u32) -> u32 {
    return NAME_words[params.NAME_at + i];
}
fn write_word_NAME(i: u32, word: u32) {
    NAME_words[params.NAME_at + i] = word;
}
";
