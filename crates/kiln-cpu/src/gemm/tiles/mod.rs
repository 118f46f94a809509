//! Products in AMX tiles: bf16 by bf16 with f32 sums, bytes by bytes with sums of 32 bits.
//!
//! To a tile both are rows of 64 bytes, so that packing and blocking are the same for both; only the instruction
//! differs, and what becomes of the sums.

mod pack;
mod panels;
mod product;
mod rows;
mod turn;

pub(crate) use pack::{LINE, PAIR, STEP, SUMS, interleave_pair, left_line, right_tiles};
pub(crate) use panels::{Halves, Panels};
pub(crate) use product::TileProduct;
pub(crate) use rows::product_by_rows;
