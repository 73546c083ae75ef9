"""Scores from hidden states and a head, with their gradient: by NumPy where that can be, else by the framework."""

from __future__ import annotations

from keptset.schemas.errors import InvalidInput
from keptset.trainer_bridge.scoring.hand import Tensor
from keptset.trainer_bridge.scoring.head import Head
from keptset.trainer_bridge.scoring.head_hand import head_hand_for
from keptset.trainer_bridge.scoring.hidden_pass import HiddenJob, HiddenPass
from keptset.trainer_bridge.scoring.host_pass import HostPass
from keptset.trainer_bridge.scoring.run import Scores


def run_hidden(work: HiddenJob, hidden_RH: Tensor, head: Head) -> Scores:
    """Scores, differentiable with regard to hidden states, weight and bias.

    Errors: InvalidInput where head and hidden states do not fit, or a head gradient is asked for and nothing could ask
    for it.
    """
    hand = head_hand_for(hidden_RH)
    if work.head_gradient is not None:
        work.head_gradient.check(hand, head)
    sources = (hidden_RH, head.weight_VH, head.bias_V)
    asks = tuple(hand.wants_gradient(source) for source in sources)
    one_pass = HostPass.of(hand, work, hidden_RH, head, asks) or HiddenPass(hand, work, hidden_RH, head, asks)
    values, entropy_T, full_logprobs_T = one_pass.forward()
    if any(asks):
        values = hand.attach_all(values, sources, one_pass.backward)
    elif work.head_gradient is not None and hand.records_gradients():
        raise InvalidInput(
            "head_gradient is given, and neither the hidden states nor the head ask for a gradient, so no backward "
            "pass will come by: let the head's weight ask for one (its own .grad stays empty)"
        )
    return Scores(
        logprobs_T=values[0],
        over="kept",
        entropy_T=entropy_T,
        full_logprobs_T=full_logprobs_T,
        violations=work.job.plan.violations,
        kept_logprobs_N=values[1] if work.distribution else None,
    )
