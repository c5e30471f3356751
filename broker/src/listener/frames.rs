//! The frames of HTTP/2 that the broker writes to a connection. They alone tell that a connection is ended because of what
//! came over it: the server that ends it tells nobody else.

/// The length of a frame, its type, flags and stream.
const HEADER: usize = 9;
/// The type of a frame that ends a connection.
const GOAWAY: u8 = 7;
/// How much of GOAWAY tells the reason: the header, the last stream, the reason.
const UP_TO_REASON: usize = HEADER + 8;
/// The reason of a GOAWAY after too many resets, faulty calls or headers.
const ENHANCE_YOUR_CALM: [u8; 4] = [0, 0, 0, 11];

/// Follows the frames of one connection from its beginning.
#[derive(Debug, Default)]
pub(super) struct Frames {
    /// The beginning of a frame, as far as it is of interest.
    head: [u8; UP_TO_REASON],
    /// How much of the beginning there is.
    length: usize,
    /// How many bytes of the frame are to come behind its beginning.
    left: usize,
}

impl Frames {
    /// Follows the next bytes. Returns true if they end the connection because of too many resets, faulty calls or headers.
    pub(super) fn end_for_abuse(&mut self, mut bytes: &[u8]) -> bool {
        let mut ends = false;
        while let Some((first, rest)) = bytes.split_first() {
            if self.left > 0 {
                let skipped = self.left.min(bytes.len());
                self.left -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            self.head[self.length] = *first;
            self.length += 1;
            bytes = rest;
            let is_goaway = self.length >= HEADER && self.head[3] == GOAWAY;
            if self.length == if is_goaway { UP_TO_REASON } else { HEADER } {
                let [a, b, c, ..] = self.head;
                let payload = u32::from_be_bytes([0, a, b, c]) as usize;
                self.left = payload.saturating_sub(self.length - HEADER);
                self.length = 0;
                ends |= is_goaway && self.head.ends_with(&ENHANCE_YOUR_CALM);
            }
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, 0, 0, 0, 0, 0], payload].concat()
    }

    /// Returns how often the bytes end the connection, when they are written in parts of this size.
    fn ends(bytes: &[u8], part: usize) -> usize {
        let mut frames = Frames::default();
        bytes.chunks(part).filter(|part| frames.end_for_abuse(part)).count()
    }

    #[test]
    fn the_reason_of_an_end_is_read_wherever_frames_are_cut() {
        let abused = frame(GOAWAY, b"\0\0\x17\xd3\0\0\0\x0btoo_many_resets");
        let aged = frame(GOAWAY, b"\0\0\x17\xd3\0\0\0\0");
        let settings = frame(4, &[]);
        // An item cannot pass for an end of its consumer's connection.
        let data = frame(0, &[&vec![0; 300], &abused[..]].concat());
        for part in [1, 2, 7, 8, 9, 10, 100, 10_000] {
            let calm = [&settings[..], &data, &aged, &data].concat();
            assert_eq!(ends(&calm, part), 0, "in parts of {part}");
            assert_eq!(ends(&[&calm[..], &abused].concat(), part), 1, "in parts of {part}");
        }
    }
}
