//! Products in AMX tiles: bf16 by bf16 with f32 sums, bytes by bytes with sums of 32 bits.
//!
//! To a tile both are rows of 64 bytes, so that blocking is the same for both. They differ in who is rearranged: bf16
//! weights stay as their file has them ([`product`]), while bytes are made, or read, once and kept as tiles ([`turned`],
//! [`bytes`]).

mod beside;
mod bytes;
mod order;
mod pack;
mod panels;
mod product;
mod rows;
mod turn;
mod turned;

pub(crate) use bytes::ByteProduct;
pub(crate) use pack::{LINE, PAIR, STEP, SUMS, interleave_pair, left_line, right_tiles};
pub(crate) use panels::{Halves, Panels};
pub(crate) use product::TileProduct;
pub(crate) use rows::product_by_rows;
pub(crate) use turned::Turned;
