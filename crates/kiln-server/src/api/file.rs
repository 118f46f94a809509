//! Responses that are files. A file is read as the client takes it: one that does not read holds a part of it in memory.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use tokio::task::spawn_blocking;

/// Bytes that are read at one time.
const PART: usize = 64 << 10;

/// A response with this file. Blocks while the file is opened.
pub(crate) fn file_response(path: &Path, media_type: &'static str) -> io::Result<Response> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let parts = stream::try_unfold((file, length), |(file, left)| async move {
        if left == 0 {
            return Ok::<_, io::Error>(None);
        }
        let (part, file) = spawn_blocking(move || read_part(file, left)).await??;
        let left = left - part.len() as u64;
        Ok(Some((part, (file, left))))
    });
    let mut response = super::response(StatusCode::OK, media_type, Bytes::new());
    *response.body_mut() = Body::from_stream(parts);
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

fn read_part(mut file: File, left: u64) -> io::Result<(Bytes, File)> {
    let mut part = vec![0; usize::try_from(left).unwrap_or(PART).min(PART)];
    file.read_exact(&mut part)?;
    Ok((part.into(), file))
}
