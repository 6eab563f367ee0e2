//! Recorded drafts: where they were made, how confidently, and how much of them the target accepts.

use dspark_sched_core::Error;

/// Borrowed columns of a trace: N requests, M rounds in all, gamma drafted tokens at most.
#[derive(Debug, Clone, Copy)]
pub struct TraceArrays<'a> {
    /// Prompt tokens, `[N]`, at least 1.
    pub prompt: &'a [i64],
    /// Tokens of the whole output, `[N]`, at least 1.
    pub output: &'a [i64],
    /// `max_tokens` that it was asked with, `[N]`, at least the output.
    pub most: &'a [i64],
    /// The rounds of request i are `offsets[i]..offsets[i + 1]`, `[N + 1]`.
    pub offsets: &'a [i64],
    /// Output tokens before the round, `[M]`, rising within a request.
    pub at: &'a [i64],
    /// Drafted tokens, `[M]`, in `0..=gamma`.
    pub drafted: &'a [i64],
    /// How many of them, from the first, the target accepts, `[M]`.
    pub accepted: &'a [i64],
    /// c, `[M, gamma]` row-major, in `[0, 1]`; what lies beyond `drafted` means nothing.
    pub probs: &'a [f64],
    /// Columns of `probs`.
    pub gamma: usize,
    /// The drafter reads features of the target, so that it drafts nothing in the step that reads the prompt.
    pub taps: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Round {
    at: u64,
    drafted: usize,
    accepted: usize,
}

#[derive(Debug, Clone, Copy)]
struct Request {
    prompt: u64,
    output: u64,
    most: u64,
    first: usize,
    end: usize,
}

/// What a drafter proposes at one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draft {
    /// Drafted tokens.
    pub len: usize,
    /// How many of them the target accepts if all are verified.
    pub accepted: usize,
}

/// A checked trace.
#[derive(Debug, Clone)]
pub struct Trace {
    requests: Vec<Request>,
    rounds: Vec<Round>,
    probs: Vec<f64>,
    gamma: usize,
    taps: bool,
    rates: Vec<f64>,
}

impl Trace {
    /// Check and copy a trace.
    ///
    /// # Errors
    /// For arrays whose lengths contradict one another, and for values out of range.
    pub fn new(arrays: &TraceArrays<'_>) -> Result<Self, Error> {
        let (requests, rounds) = (arrays.prompt.len(), arrays.at.len());
        check_len("output", arrays.output.len(), requests)?;
        check_len("most", arrays.most.len(), requests)?;
        check_len("offsets", arrays.offsets.len(), requests + 1)?;
        check_len("drafted", arrays.drafted.len(), rounds)?;
        check_len("accepted", arrays.accepted.len(), rounds)?;
        check_len("probs", arrays.probs.len(), rounds * arrays.gamma)?;
        if requests == 0 {
            return Err(Error::Argument("a trace needs at least one request".into()));
        }
        if let Some(at) = arrays.probs.iter().position(|c| !(0.0..=1.0).contains(c)) {
            return Err(Error::Value {
                what: "probs",
                row: at / arrays.gamma.max(1),
                position: at % arrays.gamma.max(1),
                value: arrays.probs.get(at).copied().unwrap_or(f64::NAN),
                allowed: "a number from 0 to 1",
            });
        }
        let mut trace = Self {
            requests: Vec::with_capacity(requests),
            rounds: Vec::with_capacity(rounds),
            probs: arrays.probs.to_vec(),
            gamma: arrays.gamma,
            taps: arrays.taps,
            rates: Vec::new(),
        };
        trace.read_rounds(arrays)?;
        trace.read_requests(arrays)?;
        trace.rates = trace.conditional_rates();
        Ok(trace)
    }

    fn read_rounds(&mut self, arrays: &TraceArrays<'_>) -> Result<(), Error> {
        let columns = arrays.at.iter().zip(arrays.drafted).zip(arrays.accepted);
        for (i, ((&at, &drafted), &accepted)) in columns.enumerate() {
            let whole = |value: i64| usize::try_from(value).ok();
            match (u64::try_from(at), whole(drafted), whole(accepted)) {
                (Ok(at), Some(drafted), Some(accepted))
                    if accepted <= drafted && drafted <= arrays.gamma && at < LONGEST =>
                {
                    self.rounds.push(Round {
                        at,
                        drafted,
                        accepted,
                    });
                }
                _ => {
                    return Err(Error::Argument(format!(
                        "round {i}: expected at >= 0 and 0 <= accepted <= drafted <= {}, got at {at}, accepted {accepted}, drafted {drafted}",
                        arrays.gamma
                    )));
                }
            }
        }
        Ok(())
    }

    fn read_requests(&mut self, arrays: &TraceArrays<'_>) -> Result<(), Error> {
        let rounds = self.rounds.len();
        let lengths = arrays.prompt.iter().zip(arrays.output).zip(arrays.most);
        let ranges = arrays.offsets.iter().zip(arrays.offsets.iter().skip(1));
        for (i, (((&prompt, &output), &most), (&first, &end))) in lengths.zip(ranges).enumerate() {
            let counts = [prompt, output, most].map(|n| u64::try_from(n).unwrap_or(0));
            let [prompt, output, most] = counts;
            if counts.iter().any(|n| !(1..LONGEST).contains(n)) || most < output {
                return Err(Error::Argument(format!(
                    "request {i}: expected a prompt and an output of at least 1 token and max_tokens of at least the output, got {prompt}, {output} and {most}"
                )));
            }
            let range = usize::try_from(first).ok().zip(usize::try_from(end).ok());
            let mine = range.and_then(|(first, end)| self.rounds.get(first..end));
            let rising = mine.is_some_and(|m| m.iter().zip(m.iter().skip(1)).all(|(a, b)| a.at < b.at));
            let Some((first, end)) = range.filter(|_| rising) else {
                return Err(Error::Argument(format!(
                    "request {i}: expected rounds within 0..{rounds} that rise in at, got {first}..{end}"
                )));
            };
            self.requests.push(Request {
                prompt,
                output,
                most,
                first,
                end,
            });
        }
        Ok(())
    }

    fn conditional_rates(&self) -> Vec<f64> {
        (0..self.gamma)
            .map(|k| {
                let reached = self.rounds.iter().filter(|r| r.drafted > k && r.accepted >= k);
                let (count, won) = reached.fold((0_u64, 0_u64), |(count, won), r| {
                    (count + 1, won + u64::from(r.accepted > k))
                });
                if count == 0 {
                    0.0
                } else {
                    won as f64 / count as f64
                }
            })
            .collect()
    }

    /// Requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Never true: a trace has a request at least.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Rounds of all requests.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds.len()
    }

    /// Longest draft.
    #[must_use]
    pub fn gamma(&self) -> usize {
        self.gamma
    }

    /// Whether nothing is drafted in the step that reads a prompt.
    #[must_use]
    pub fn taps(&self) -> bool {
        self.taps
    }

    /// Share of the drafts that reached position k and were accepted there, `[gamma]`; 0 where none did.
    #[must_use]
    pub fn rates(&self) -> &[f64] {
        &self.rates
    }

    /// Prompt tokens, output tokens and `max_tokens` of a request.
    #[must_use]
    pub fn lengths(&self, request: usize) -> (u64, u64, u64) {
        self.requests
            .get(request)
            .map_or((1, 1, 1), |r| (r.prompt, r.output, r.most))
    }

    /// What is drafted after `at` output tokens; its confidences go to `c`, whose length is the gamma asked for.
    ///
    /// A place at which a draft was recorded gives that draft. Between two of them stands what the earlier one drafted
    /// beyond the place: it fails where that one failed. Where that one did not fail, `coin` decides by the average of
    /// the position whether the next token passes, and what was drafted after it follows.
    pub fn draft(&self, request: usize, at: u64, coin: f64, c: &mut [f64]) -> Draft {
        c.fill(0.0);
        let mine = self.requests.get(request).map_or(0..0, |r| r.first..r.end);
        let rounds = self.rounds.get(mine.clone()).unwrap_or_default();
        let after = rounds.partition_point(|r| r.at <= at);
        let here = after.checked_sub(1).and_then(|i| rounds.get(i).map(|r| (i, *r)));
        let next = rounds.get(after).map(|r| (after, *r));
        match (here, next) {
            (None, None) => Draft { len: 0, accepted: 0 },
            (None, Some((i, round))) => self.recorded(mine.start + i, round, 0, c),
            (Some((i, round)), _) if round.at == at => self.recorded(mine.start + i, round, 0, c),
            (Some((i, round)), next) => {
                let shift = usize::try_from(at - round.at).unwrap_or(usize::MAX);
                if shift > round.accepted {
                    // Nothing is known of this place: the nearest draft stands for it.
                    let (i, round) = next.unwrap_or((i, round));
                    return self.recorded(mine.start + i, round, 0, c);
                }
                let known = self.recorded(mine.start + i, round, shift, c);
                if round.accepted < round.drafted {
                    return known;
                }
                let next = next.map(|(i, round)| (mine.start + i, round));
                self.extended(known.len, next, coin, c)
            }
        }
    }

    /// A recorded draft without its first `shift` tokens.
    fn recorded(&self, index: usize, round: Round, shift: usize, c: &mut [f64]) -> Draft {
        let len = round.drafted.saturating_sub(shift).min(c.len());
        let from = index * self.gamma + shift;
        let probs = self.probs.get(from..from + len).unwrap_or_default();
        for (to, &p) in c.iter_mut().zip(probs) {
            *to = p;
        }
        Draft {
            len,
            accepted: round.accepted.saturating_sub(shift).min(len),
        }
    }

    /// A draft of `known` accepted tokens, then one that was not drafted, then the next recorded draft.
    fn extended(&self, known: usize, next: Option<(usize, Round)>, coin: f64, c: &mut [f64]) -> Draft {
        let rate = self.rates.get(known).copied().unwrap_or(0.0);
        let Some((head, tail)) = c.get_mut(known..).and_then(|rest| rest.split_first_mut()) else {
            return Draft {
                len: known,
                accepted: known,
            };
        };
        *head = rate;
        if coin >= rate {
            return Draft {
                len: known + 1,
                accepted: known,
            };
        }
        let more = next.map_or(Draft { len: 0, accepted: 0 }, |(i, round)| {
            self.recorded(i, round, 0, tail)
        });
        Draft {
            len: known + 1 + more.len,
            accepted: known + 1 + more.accepted,
        }
    }
}

/// Token counts that stay far from overflow in sums.
const LONGEST: u64 = 1 << 32;

fn check_len(what: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::Shape { what, expected, got })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrays<'a>() -> TraceArrays<'a> {
        TraceArrays {
            prompt: &[5],
            output: &[9],
            most: &[9],
            offsets: &[0, 3],
            at: &[1, 4, 5],
            drafted: &[3, 3, 3],
            accepted: &[2, 0, 3],
            probs: &[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.95, 0.85, 0.75],
            gamma: 3,
            taps: true,
        }
    }

    fn draft(at: u64, coin: f64, gamma: usize) -> (usize, usize, Vec<f64>) {
        let mut c = vec![9.0; gamma];
        let d = Trace::new(&arrays()).unwrap().draft(0, at, coin, &mut c);
        (d.len, d.accepted, c)
    }

    #[test]
    fn a_recorded_place_gives_its_draft_and_a_shorter_gamma_its_beginning() {
        assert_eq!(draft(1, 0.0, 3), (3, 2, vec![0.9, 0.8, 0.7]));
        assert_eq!(draft(4, 0.0, 3), (3, 0, vec![0.6, 0.5, 0.4]));
        assert_eq!(draft(1, 0.0, 1), (1, 1, vec![0.9]));
        assert_eq!(draft(1, 0.0, 0), (0, 0, vec![]));
    }

    #[test]
    fn a_place_in_between_fails_where_the_recorded_draft_failed() {
        assert_eq!(draft(2, 0.0, 3), (2, 1, vec![0.8, 0.7, 0.0]));
        assert_eq!(draft(3, 0.0, 3), (1, 0, vec![0.7, 0.0, 0.0]));
    }

    #[test]
    fn beyond_a_draft_that_did_not_fail_the_average_decides() {
        // Position 3 was reached twice and accepted once: the rate of what follows two known tokens is 1/2.
        let trace = Trace::new(&arrays()).unwrap();
        assert_eq!(trace.rates(), [2.0 / 3.0, 1.0, 0.5]);
        assert_eq!(draft(6, 0.4, 3), (3, 3, vec![0.85, 0.75, 0.5]));
        assert_eq!(draft(6, 0.6, 3), (3, 2, vec![0.85, 0.75, 0.5]));
        assert_eq!(draft(6, 0.6, 2), (2, 2, vec![0.85, 0.75]));
    }

    #[test]
    fn places_without_a_record_take_the_nearest() {
        assert_eq!(draft(0, 0.0, 3), draft(1, 0.0, 3));
        // After all that is recorded, nothing is known: the last draft stands for it.
        assert_eq!(draft(40, 0.0, 3).1, 3);
    }

    #[test]
    fn malformed_traces_are_refused_by_name() {
        let refused = |change: fn(&mut TraceArrays<'_>)| {
            let mut a = arrays();
            change(&mut a);
            Trace::new(&a).unwrap_err().to_string()
        };
        assert!(refused(|a| a.at = &[1, 4]).contains("drafted: expected 2"));
        assert!(refused(|a| a.accepted = &[2, 0, 4]).contains("round 2"));
        assert!(refused(|a| a.at = &[1, 1, 5]).contains("request 0: expected rounds"));
        assert!(refused(|a| a.most = &[8]).contains("max_tokens"));
        assert!(refused(|a| a.offsets = &[0, 4]).contains("0..4"));
        assert!(
            refused(|a| a.probs = &[0.9, 0.8, 0.7, 0.6, 1.5, 0.4, 0.9, 0.9, 0.9]).contains("probs[1, 1]")
        );
    }
}
