//! Products in AMX tiles: bf16 with f32 sums, int8 with 32-bit sums.
//!
//! A tile is 16 rows of 64 bytes, whatever the number format, so both formats are blocked in the same way. Tiles are
//! used two at a time: a [`PAIR`] of left rows by a [`PAIR`] of right columns, whose sums are a *quad* of tiles.
//! A *step* multiplies 64 bytes of each row.
//!
//! The formats differ in which operand is rearranged. A bf16 weight keeps its file's layout and is the left operand
//! ([`gemm_bf16`]); an int8 weight is packed as right tiles once, when it is loaded ([`packed_weight`], [`gemm_int8`]).
//!
//! The caches are the limit, not the tiles: a Sapphire Rapids core's L2 cache delivers 84 GB/s, of which the tokens of
//! a bf16 step take 60, and L3 27. One thread reaches 85 % of the tiles' rate with tokens in L2; 74 %
//! with 384 of the next tokens coming from L3, 68 % with 512 (hence [`sizes::MC`]); a whole layer 44 to 47 %.

mod gemm_bf16;
mod gemm_conv;
mod gemm_int8;
mod operand;
mod overlap;
mod pack;
mod packed_weight;
mod prefetch;
mod sizes;
mod transpose;

pub(crate) use gemm_bf16::AmxBf16Gemm;
pub(crate) use gemm_conv::amx_conv_gemm;
pub(crate) use gemm_int8::AmxInt8Gemm;
pub(crate) use operand::TiledOperand;
pub(crate) use pack::{pack_left_row, pack_right_row_pair, pack_right_tiles};
pub(crate) use packed_weight::PackedInt8Weight;
pub(crate) use sizes::{PAIR, QUAD_SUMS, TILE_ROW_BF16, TILE_ROW_BYTES};
