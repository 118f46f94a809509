//! Responses that are files. A file is read as the client takes it: one that does not read holds a part of it in memory.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use tokio::task::spawn_blocking;

use super::conditional::{ETag, Selection, respond, select};

/// Bytes that are read at one time.
const PART: usize = 64 << 10;

/// A response with this file, or what the request's headers want of it. Without an `etag`, the file may be replaced
/// under its path. Blocks while the file is opened.
pub(crate) fn file_response(
    path: &Path,
    media_type: &'static str,
    etag: Option<ETag>,
    headers: &HeaderMap,
) -> io::Result<Response> {
    let mut file = File::open(path)?;
    let metadata = file.metadata()?;
    let length = metadata.len();
    let etag = etag.unwrap_or_else(|| ETag::of_file(&metadata));
    let selection = select(headers, &etag, length);
    if let Selection::Part(range) = &selection {
        file.seek(SeekFrom::Start(range.start))?;
    }
    Ok(respond(selection, &etag, length, media_type, |range| stream_file(file, range.end - range.start)))
}

/// A response with bytes that are in memory, or what the request's headers want of them.
pub(crate) fn bytes_response(bytes: Bytes, media_type: &'static str, headers: &HeaderMap) -> Response {
    let etag = ETag::of_bytes(&bytes);
    let length = bytes.len() as u64;
    let part =
        |range: std::ops::Range<u64>| Body::from(bytes.slice(range.start as usize..range.end as usize));
    respond(select(headers, &etag, length), &etag, length, media_type, part)
}

fn stream_file(file: File, length: u64) -> Body {
    Body::from_stream(stream::try_unfold((file, length), |(file, left)| async move {
        if left == 0 {
            return Ok::<_, io::Error>(None);
        }
        let (part, file) = spawn_blocking(move || read_part(file, left)).await??;
        let left = left - part.len() as u64;
        Ok(Some((part, (file, left))))
    }))
}

fn read_part(mut file: File, left: u64) -> io::Result<(Bytes, File)> {
    let mut part = vec![0; usize::try_from(left).unwrap_or(PART).min(PART)];
    file.read_exact(&mut part)?;
    Ok((part.into(), file))
}
