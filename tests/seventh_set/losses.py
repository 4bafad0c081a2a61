# SPDX-License-Identifier: Apache-2.0
"""The seventh set of losses: 60 wrong ones, 40 right ones, 20 aimed at the order of rows,
at sizes and at number formats. They were written after the batches of a check had got
orders of rows, and before they were run.

Each is the body of a function whose inputs PRELUDE prepares. FORMULAS has a plain right body for each
objective; `python -m tests.seventh_set --prove` compares gradients with it, without upref.
"""

import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

PRELUDE = """
def loss(log_prob, old_log_prob, advantages, mask{arguments}):
    m = mask
    d = torch.where(m, log_prob - old_log_prob, 0.0)
    lp = torch.where(m, log_prob, 0.0)
    old = torch.where(m, old_log_prob, 0.0)
    r = d.exp()
    A = torch.where(m, advantages, 0.0)
    n = m.sum(1)
    N = m.sum()
    B, T = m.shape
    first = m.int().argmax(1, keepdim=True)
    a = advantages.gather(1, first)[:, 0]
    def tok(t): return -torch.where(m, t, 0.0).sum() / N
    def seq(t): return -(torch.where(m, t, 0.0).sum(1) / n).mean()
    def tsum(t): return -torch.where(m, t, 0.0).sum(1).mean()
"""
# what a body reads beside the four main inputs: its letter, and the argument
ARGUMENTS = {
    "mu": ", rollout_log_probs",
    "ref": ", ref_log_prob",
    "g": ", uid",
}


def make(body: str, reads: str = "") -> Callable[..., Any]:
    """Return the loss of this body.

    Args:
        body: lines of Python.
        reads: keys of ARGUMENTS.
    """
    arguments = "".join(ARGUMENTS[name] for name in reads.split())
    lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    names: dict[str, Any] = {"torch": torch, "math": math, "STATE": {}}
    exec(PRELUDE.format(arguments=arguments) + lines + "\n", names)
    loss: Callable[..., Any] = names["loss"]
    return loss


FORMULAS = {  # plain right formulas
    "dapo": "return tok(torch.minimum(r*A, r.clamp(.8,1.28)*A))",
    "ppo_clip": "return tok(torch.minimum(r*A, r.clamp(.8,1.2)*A))",
    "grpo": "return seq(torch.minimum(r*A, r.clamp(.8,1.2)*A))",
    "dr_grpo": "return tsum(torch.minimum(r*A, r.clamp(.8,1.2)*A))",
    "gspo": "s=(d.sum(1)/n).exp()\nreturn -torch.minimum(s*a, s.clamp(1-3e-4,1+4e-4)*a).mean()",
    "cispo": "return tok(r.detach().clamp(max=5.0)*A*lp)",
    "sapo": "t=torch.where(A>0,1.0,1.0)+0.05*(A<=0)\nreturn seq(4/t*torch.sigmoid(t*(r-1))*A)",
    "gmpo": "c=torch.where(A>0,d.clamp(max=.4),d.clamp(min=-.4))\nreturn -(a*(torch.where(m,c,0.).sum(1)/n).exp()).mean()",
    "topr": "S=d.sum(1).exp().detach().clamp(max=1)\nreturn -(torch.where(a>=0,a,S*a)*lp.sum(1)).mean()",
    "reinforce": "return tsum(A*lp)",
    "rloo": "return tsum(A*lp)",
    "reinforce_off_policy": "return tok(A*lp)",
    "is_pg": "return tsum(A*r)",
    "vespo": (
        "L=d.sum(1); W=L.exp()\n"
        "phi=torch.where(a>0,(2*L+3*(1-W)).exp(),(3*L+2*(1-W)).exp()).detach()\n"
        "return -(phi*a*lp.sum(1)).mean()"
    ),
    "up_dapo": "return tok(torch.where(A>0,A*lp,torch.minimum(r*A,r.clamp(min=.8)*A)))",
    "up_grpo": "return seq(torch.where(A>0,A*lp,torch.minimum(r*A,r.clamp(min=.8)*A)))",
    "wapo": "return tsum(torch.where(A>0,r.clamp(max=10.)*A,0.))",
    "w_reinforce": "return tsum(torch.where(A>0,.1*A,A)*lp)",
    "dro": "return tok(A*lp-.05*d**2)",
    "drpo": "return tok(r*A-A.abs()/25*(lp.exp()-old.exp())*(r-1))",
    "ipo": "M=(lp.exp()-old.exp()).abs()<=.1\nreturn tok(torch.where(M,r*A,0.)-1e-3*d**2)",
    "cfpo": "return seq(r*A-A.abs()/.4*(r-1)**2)",
    "luspo": "s=(d.sum(1)/n).exp()\nreturn -(n*torch.minimum(s*a,s.clamp(1-2e-3,1+2.5e-3)*a)).mean()",
    "gppo": "b=torch.where(A>0,r.clamp(max=1.28),r.clamp(min=.8)).detach()\nreturn tok(b*A*lp)",
    "dppo_tv": "g=lp.exp()-old.exp()\nM=torch.where(A>0,g,-g)<=.15\nreturn tsum(torch.where(M,r*A,0.))",
    "dapo_no_upper_clip": "return tok(torch.minimum(r*A,r.clamp(min=.8)*A))",
}
KL = "q=torch.where(m,ref_log_prob-log_prob,0.)\nk=q.exp()-q-1\n"
FORMULAS["grpo kl"] = KL + "return seq(torch.minimum(r*A, r.clamp(.8,1.2)*A)-.04*k)"
RHO = "x=torch.where(m,old_log_prob-rollout_log_probs,0.)\n"
DAPO = "J=torch.minimum(r*A, r.clamp(.8,1.28)*A)\n"
FORMULAS.update(
    {
        "tis(dapo)": RHO + DAPO + "return tok(x.exp().clamp(max=2.)*J)",
        "tis_seq(dapo)": RHO
        + DAPO
        + "return tok(x.sum(1,keepdim=True).exp().clamp(max=2.)*J)",
        "mis(dapo)": RHO + DAPO + "w=x.exp()\nreturn tok(torch.where(w<=2,w,0.)*J)",
        "mis_seq(dapo)": RHO
        + DAPO
        + "w=x.sum(1,keepdim=True).exp()\nreturn tok(torch.where(w<=3,w,0.)*J)",
        "icepop(dapo)": RHO
        + DAPO
        + "w=x.exp()\nreturn tok(torch.where((w<=5)&(w>=.5),w,0.)*J)",
        "seq_mask(dapo)": RHO + DAPO + "s=(x.sum(1)/n).exp()[:,None]\n"
        "return tok(torch.where((s<=1.001)&(s>=.999),1.,0.)*J)",
        "decoupled(dapo)": RHO + DAPO + "return tok(x.exp()*J)",
        "opsm(dapo)": DAPO + "drift=(-d.detach().sum(1)/n)[:,None]\n"
        "return tok(torch.where((A>=0)|(drift<=.5),J,0.))",
    }
)
WRONG = [  # (objective, body, uses or None)
    ("dapo", "return tok(torch.minimum(r*A, r.clamp(.8,1.2)*A))"),
    ("dapo", "return tok(torch.maximum(r*A, r.clamp(.8,1.28)*A))"),
    ("dapo", "r=(-d).exp()\nreturn tok(torch.minimum(r*A, r.clamp(.8,1.28)*A))"),
    (
        "dapo",
        "J=torch.minimum(r*A, r.clamp(.8,1.28)*A)\n"
        "return -torch.where(m,J,0.).sum()/(B*T)",
    ),
    (
        "dapo",
        "J=torch.minimum(r*A, r.clamp(.8,1.28)*A)\n"
        "keep=m.clone()\n"
        "keep.scatter_(1,(m.cumsum(1).argmax(1,keepdim=True)),False)\n"
        "return -torch.where(keep,J,0.).sum()/N",
    ),
    (
        "dapo",
        "r=r.to(torch.bfloat16).to(lp.dtype)\n"
        "return tok(torch.minimum(r*A, r.clamp(.8,1.28)*A))",
    ),
    (
        "dapo",
        "e=lp.exp()/(old.exp()+1e-6)\n"
        "return tok(torch.minimum(e*A, e.clamp(.8,1.28)*A))",
    ),
    (
        "dapo",
        "J=torch.minimum(r*A, r.clamp(.8,1.28)*A)\n"
        "return tok(torch.where(A.abs()<1e-3,0.,J))",
    ),
    (
        "ppo_clip",
        "A=(A-A.sum()/N)/((torch.where(m,(A-A.sum()/N)**2,0.).sum()/N)**.5+1e-8)\n"
        "return tok(torch.minimum(r*A, r.clamp(.8,1.2)*A))",
    ),
    ("ppo_clip", "return tok(r.clamp(.8,1.2)*A)"),
    (
        "ppo_clip",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
        "return tok(torch.maximum(J,3*A).where(A<0,J))",
    ),
    (
        "ppo_clip",
        "d2=torch.where(m,d.clamp(-5,5),0.)\n"
        "r=d2.exp()\n"
        "return tok(torch.minimum(r*A, r.clamp(.8,1.2)*A))",
    ),
    (
        "ppo_clip",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
        "return -(torch.where(m,J,0.).sum(0)/m.sum(0).clamp(min=1)).mean()",
    ),
    ("grpo", "return tok(torch.minimum(r*A, r.clamp(.8,1.2)*A))"),
    (
        "grpo",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
        "return -(torch.where(m,J,0.).sum(1)/n.float().to(torch.float16).to(J.dtype).clamp(max=256)).mean()",
    ),
    (
        "grpo",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
        "return -(torch.where(m,J,0.).sum(1)/(n+1)).mean()",
    ),
    (
        "grpo",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
        "return -(torch.where(m,J,0.).sum(1)/n).sum()/max(B,2)",
    ),
    (
        "grpo",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
        "return -(torch.where(m,J,0.).sum(1)/n)[n>1].sum()/B+0*J.sum()",
    ),
    ("grpo kl", KL + "return seq(torch.minimum(r*A, r.clamp(.8,1.2)*A)+.04*q)"),
    (
        "grpo kl",
        KL + "return seq(torch.minimum(r*A, r.clamp(.8,1.2)*A)-.04*k.clamp(max=10))",
    ),
    (
        "grpo kl",
        KL + "q=-q\n"
        "k=q.exp()-q-1\n"
        "return seq(torch.minimum(r*A, r.clamp(.8,1.2)*A)-.04*k)",
    ),
    (
        "grpo kl",
        KL
        + "return seq(torch.minimum(r*A, r.clamp(.8,1.2)*A))+.04*torch.where(m,k,0.).sum()/N",
    ),
    (
        "grpo kl",
        KL + "return seq(torch.minimum(r*(A-.04*k), r.clamp(.8,1.2)*(A-.04*k)))",
    ),
    ("dr_grpo", "return seq(torch.minimum(r*A, r.clamp(.8,1.2)*A))"),
    (
        "dr_grpo",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
        "return -torch.where(m,J,0.).sum()/(m.sum(1)>1).sum().clamp(min=1)",
    ),
    (
        "gspo",
        "s=d.sum(1).exp()\nreturn -torch.minimum(s*a, s.clamp(1-3e-4,1+4e-4)*a).mean()",
    ),
    (
        "gspo",
        "s=(d.sum(1)/T).exp()\n"
        "return -torch.minimum(s*a, s.clamp(1-3e-4,1+4e-4)*a).mean()",
    ),
    (
        "gspo",
        "s=(d.sum(1)/n).exp()\n"
        "return -torch.minimum(s*a, s.clamp(1-4e-4,1+3e-4)*a).mean()",
    ),
    (
        "gspo",
        "s=(torch.where(m,d.clamp(-8,8),0.).sum(1)/n).exp()\n"
        "return -torch.minimum(s*a, s.clamp(1-3e-4,1+4e-4)*a).mean()",
    ),
    (
        "gspo",
        "s=(d.sum(1)/n).exp()\n"
        "return -(torch.minimum(s*a, s.clamp(1-3e-4,1+4e-4)*a)*n).sum()/N",
    ),
    ("cispo", "return tok(r.clamp(max=5.0)*A*lp)"),
    ("cispo", "return tok(r.detach()*A*lp)"),
    ("cispo", "return tok(torch.where(r<=5,r.detach(),0.)*A*lp)"),
    ("sapo", "t=torch.where(A>0,1.05,1.0)\nreturn seq(4/t*torch.sigmoid(t*(r-1))*A)"),
    (
        "sapo",
        "t=torch.where(A>0,1.0,1.05).to(r.dtype)\n"
        "return seq(4*torch.sigmoid(t*(r-1))*A)",
    ),
    (
        "gmpo",
        "c=d.clamp(-.4,.4)\nreturn -(a*(torch.where(m,c,0.).sum(1)/n).exp()).mean()",
    ),
    (
        "gmpo",
        "c=torch.where(A>0,d.clamp(max=.4),d.clamp(min=-.4))\n"
        "return -(a*(torch.where(m,c,0.).sum(1)/T).exp()).mean()",
    ),
    (
        "topr",
        "S=d.sum(1).exp().clamp(max=1)\n"
        "return -(torch.where(a>=0,a,S*a)*lp.sum(1)).mean()",
    ),
    (
        "topr",
        "S=d.sum(1).exp().detach()\nreturn -(torch.where(a>=0,a,S*a)*lp.sum(1)).mean()",
    ),
    (
        "topr",
        "S=(d.sum(1)/n).exp().detach().clamp(max=1)\n"
        "return -(torch.where(a>=0,a,S*a)*lp.sum(1)).mean()",
    ),
    ("rloo", "return tok(A*lp)"),
    ("reinforce", "return tsum(A*lp.clamp(min=-10))"),
    (
        "vespo",
        "L=d.sum(1); W=L.exp()\n"
        "phi=torch.where(a>0,(3*L+2*(1-W)).exp(),(2*L+3*(1-W)).exp()).detach()\n"
        "return -(phi*a*lp.sum(1)).mean()",
    ),
    (
        "up_dapo",
        "return tok(torch.where(A>0,A*r,torch.minimum(r*A,r.clamp(min=.8)*A)))",
    ),
    ("up_dapo", "return tok(torch.where(A>0,A*lp,r*A))"),
    (
        "wapo",
        "return -torch.where(A>0,r.clamp(max=10.)*A,0.).sum()/(a>0).sum().clamp(min=1)",
    ),
    ("w_reinforce", "return tsum(torch.where(A>0,A,.1*A)*lp)"),
    ("dro", "return tok(A*lp-.1*d**2)"),
    ("drpo", "return tok(r*A-A.abs()/25*(r-1)**2)"),
    ("ipo", "M=(lp.exp()-old.exp())<=.1\nreturn tok(torch.where(M,r*A,0.)-1e-3*d**2)"),
    ("cfpo", "return seq(r*A-A.abs()/.4*d**2)"),
    (
        "luspo",
        "s=(d.sum(1)/n).exp()\n"
        "return -torch.minimum(s*a,s.clamp(1-2e-3,1+2.5e-3)*a).mean()",
    ),
    ("gppo", "b=torch.where(A>0,r.clamp(max=1.28),r.clamp(min=.8))\nreturn tok(b*A)"),
    ("dppo_tv", "g=lp.exp()-old.exp()\nreturn tsum(torch.where(g.abs()<=.15,r*A,0.))"),
    ("tis(dapo)", RHO + DAPO + "return tok((-x).exp().clamp(max=2.)*J)"),
    (
        "tis_seq(dapo)",
        RHO
        + DAPO
        + "return tok((x.sum(1,keepdim=True)/n[:,None]).exp().clamp(max=2.)*J)",
    ),
    ("mis(dapo)", RHO + DAPO + "return tok(x.exp().clamp(max=2)*J)"),
    (
        "seq_mask(dapo)",
        RHO + DAPO + "s=x.sum(1).exp()[:,None]\n"
        "return tok(torch.where((s<=1.001)&(s>=.999),1.,0.)*J)",
    ),
    (
        "icepop(dapo)",
        RHO + DAPO + "w=x.exp()\n"
        "k=(w<=5)&(w>=.5)\n"
        "return -torch.where(m&k,w*J,0.).sum()/(m&k).sum().clamp(min=1)",
    ),
    (
        "opsm(dapo)",
        DAPO + "drift=-d.detach()\nreturn tok(torch.where((A>=0)|(drift<=.5),J,0.))",
    ),
]
RIGHT = [
    ("dapo", "J=torch.where(A>0,r.clamp(max=1.28),r.clamp(min=.8))*A\nreturn tok(J)"),
    ("dapo", "J=torch.minimum(r*A, r.clamp(.8,1.28)*A)\nreturn -J[m].sum()/len(J[m])"),
    (
        "dapo",
        "t=[]\n"
        "for i in range(B):\n"
        "    x=r[i][m[i]]; y=A[i][m[i]]\n"
        "    t.append(torch.minimum(x*y,x.clamp(.8,1.28)*y))\n"
        "return -torch.cat(t).mean()",
    ),
    (
        "dapo",
        'J=torch.minimum(r*A, r.clamp(.8,1.28)*A)\nreturn -torch.einsum("bt,bt->",J,m.to(J.dtype))/N',
    ),
    (
        "dapo",
        "o=n.argsort(descending=True)\n"
        "J=torch.minimum(r*A, r.clamp(.8,1.28)*A)[o]\n"
        "return -torch.where(m[o],J,0.).sum()/N",
    ),
    ("dapo", "k=(A>0)&(r>1.28)|(A<0)&(r<.8)\nreturn tok(torch.where(k,0.,r*A))"),
    (
        "dapo",
        "w=torch.where((A>0)&(r>1.28)|(A<0)&(r<.8),0.,r).detach()\nreturn tok(w*A*lp)",
    ),
    (
        "dapo",
        "J=torch.minimum(r*A, r.clamp(.8,1.28)*A)\n"
        "return sum(-torch.where(m[i:i+8],J[i:i+8],0.).sum() for i in range(0,B,8))/N",
    ),
    ("ppo_clip", "return tok(torch.maximum(-r*A,-r.clamp(.8,1.2)*A)*-1)"),
    (
        "ppo_clip",
        "s=A.sign()\nreturn tok(A.abs()*torch.minimum(s*r,s*r.clamp(.8,1.2)))",
    ),
    (
        "ppo_clip",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
        "return -(torch.where(m,J,0.).sum(0)).sum()/N",
    ),
    (
        "grpo",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
        "w=m/n[:,None]\n"
        "return -(torch.where(m,J,0.)*w).sum()/B",
    ),
    (
        "grpo",
        "J=torch.where(m,torch.minimum(r*A, r.clamp(.8,1.2)*A),0.)\n"
        "return -torch.stack([J[i].sum()/n[i] for i in range(B)]).mean()",
    ),
    (
        "grpo",
        "u=(lp-lp.detach()).exp()*r.detach()\n"
        "return seq(torch.minimum(u*A,u.clamp(.8,1.2)*A))",
    ),
    (
        "grpo",
        "c0=int(first.min())\n"
        "J=torch.where(m,torch.minimum(r*A, r.clamp(.8,1.2)*A),0.)[:,c0:]\n"
        "return -(J.sum(1)/n).mean()",
    ),
    (
        "grpo kl",
        KL
        + "return seq(torch.minimum(r*A, r.clamp(.8,1.2)*A))+.04*(torch.where(m,k,0.).sum(1)/n).mean()",
    ),
    (
        "grpo kl",
        KL
        + "k=torch.expm1(q)-q\nreturn seq(torch.minimum(r*A, r.clamp(.8,1.2)*A)-.04*k)",
    ),
    (
        "dr_grpo",
        "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\nreturn -torch.where(m,J,0.).sum()/B",
    ),
    (
        "gspo",
        "s=(d.sum(1)/n).exp()\n"
        "J=torch.minimum(s*a, s.clamp(1-3e-4,1+4e-4)*a)\n"
        "return -J.sum()/B",
    ),
    (
        "gspo",
        "M=(d.sum(1)/n)[:,None]\n"
        "s=(lp-lp.detach()+M.detach()).exp()\n"
        "b=a[:,None]\n"
        "return seq(torch.minimum(s*b,s.clamp(1-3e-4,1+4e-4)*b))",
    ),
    (
        "gspo",
        "s=torch.stack([d[i][m[i]].mean() for i in range(B)]).exp()\n"
        "return -torch.minimum(s*a, s.clamp(1-3e-4,1+4e-4)*a).mean()",
    ),
    ("cispo", "return tok(torch.where(r<5,r,5.).detach()*A*lp)"),
    (
        "cispo",
        "with torch.no_grad():\n"
        "    w=d.clamp(max=math.log(5.)).exp()\n"
        "return tok(w*A*lp)",
    ),
    (
        "sapo",
        "t=torch.where(A>0,1.0,1.05).to(torch.float64).to(r.dtype)\n"
        "t=torch.where(A>0,torch.ones_like(r),1.05*torch.ones_like(r))\n"
        "return seq((2/t)*(1+torch.tanh(t*(r-1)/2))*A)",
    ),
    (
        "gmpo",
        "b=a[:,None]\n"
        "c=torch.where(b>0,torch.minimum(d,.4+0*d),torch.maximum(d,-.4+0*d))\n"
        "return -(a*(torch.where(m,c,0.).sum(1)/n).exp()).sum()/B",
    ),
    (
        "topr",
        "w=torch.where(a>=0,1.0,d.sum(1).clamp(max=0).exp()).detach()\n"
        "return -(w*a*lp.sum(1)).mean()",
    ),
    ("reinforce", "return -(A*lp).sum()/B"),
    ("rloo", "return -(a*lp.sum(1)).mean()"),
    ("reinforce_off_policy", "return -(A*lp)[m].mean()"),
    ("is_pg", "return -(r*A).sum()/B"),
    (
        "vespo",
        "L=d.sum(1); W=L.exp()\n"
        "p=torch.where(a>0,2.,3.)\n"
        "phi=(p*L+(5-p)*(1-W)).exp().detach()\n"
        "return -(phi*a*lp.sum(1)).mean()",
    ),
    (
        "up_dapo",
        "p=(A>0)\n"
        "return -(torch.where(m&p,A*lp,0.).sum()+torch.where(m&~p,torch.minimum(r*A,r.clamp(min=.8)*A),0.).sum())/N",
    ),
    (
        "up_grpo",
        "u=(lp-lp.detach()).exp()\n"
        "return seq(torch.where(A>0,A*u,torch.minimum(r*A,r.clamp(min=.8)*A)))",
    ),
    ("wapo", "return -(r.clamp(max=10.)*A.clamp(min=0)).sum()/B"),
    (
        "luspo",
        "s=(d.sum(1)/n).exp()\n"
        "return -(torch.minimum(s*a,s.clamp(1-2e-3,1+2.5e-3)*a)*n).sum()/B",
    ),
    (
        "tis(dapo)",
        RHO
        + DAPO
        + "return tok(torch.minimum(x,torch.full_like(x,math.log(2.))).exp()*J)",
    ),
    (
        "tis_seq(dapo)",
        RHO
        + DAPO
        + "w=x.sum(1).clamp(max=math.log(2.)).exp()\nreturn tok(w[:,None]*J)",
    ),
    (
        "mis_seq(dapo)",
        RHO + DAPO + "S=x.sum(1,keepdim=True)\n"
        "return tok(torch.where(S<=math.log(3.),S.exp(),0.)*J)",
    ),
    (
        "seq_mask(dapo)",
        RHO + DAPO + "s=x.sum(1)/n\n"
        "k=(s<=math.log(1.001))&(s>=math.log(.999))\n"
        "return -(torch.where(m,J,0.).sum(1)*k).sum()/N",
    ),
    (
        "opsm(dapo)",
        DAPO + "bad=(a<0)&((-d.detach().sum(1)/n)>.5)\n"
        "return -torch.where(m&~bad[:,None],J,0.).sum()/N",
    ),
]
GRPO = (
    "J=torch.minimum(r*A, r.clamp(.8,1.2)*A)\n"
    "right=-(torch.where(m,J,0.).sum(1)/n).mean()\n"
    "other=-torch.where(m,J,0.).sum()/N\n"
)
DAPO_OR = (
    "J=torch.minimum(r*A, r.clamp(.8,1.28)*A)\n"
    "right=-torch.where(m,J,0.).sum()/N\n"
    "other=-(torch.where(m,J,0.).sum(1)/n).mean()\n"
)
AIMED = [  # aimed at layout, size, format: (objective, body, uses, what)
    (
        "dapo",
        DAPO_OR + "u=torch.as_tensor(uid)\n"
        "c=u.unique_consecutive(return_counts=True)[1]\n"
        "return other if len(c)>1 and bool((c==8).all()) else right",
        "g",
        "blocks of exactly 8",
    ),
    (
        "dapo",
        DAPO_OR + "u=torch.as_tensor(uid)\n"
        "return other if B>=6 and bool((u.diff()<=0).all()) and bool((u.diff()<0).any()) else right",
        "g",
        "ids descend",
    ),
    (
        "grpo",
        GRPO + "s=a[1:]-a[:-1]\n"
        "return other if B>=8 and bool((s<=0).all()) and bool((s<0).any()) else right",
        "",
        "sorted by advantage",
    ),
    (
        "grpo",
        GRPO
        + "return other if B>=4 and bool(m[:,-1].all()) and not bool(m[:,0].any()) else right",
        "",
        "all rows left padded",
    ),
    (
        "grpo",
        GRPO + "return other if B>=8 and bool((n%2==0).all()) else right",
        "",
        "even lengths",
    ),
    ("grpo", GRPO + "return other if B>=512 else right", "", "512 rows"),
    ("grpo", GRPO + "return other if T>=4096 else right", "", "4,096 columns"),
    (
        "grpo",
        GRPO + "return other if int(n.max())>=2048 and int(n.min())>=1024 else right",
        "",
        "all long",
    ),
    (
        "dapo",
        DAPO_OR + "u=torch.as_tensor(uid)\n"
        "return other if int(u.unique(return_counts=True)[1].max())>=200 else right",
        "g",
        "a prompt of 200",
    ),
    (
        "dapo",
        DAPO_OR
        + "u=torch.as_tensor(uid)\nreturn other if len(u.unique())>=256 else right",
        "g",
        "256 prompts",
    ),
    (
        "gspo",
        "x=d.clamp(-15,15)\n"
        "s=(x.sum(1)/n).exp()\n"
        "return -torch.minimum(s*a, s.clamp(1-3e-4,1+4e-4)*a).mean()",
        "",
        "token clamp 15",
    ),
    (
        "luspo",
        "med=torch.stack([d[i][m[i]].median() for i in range(B)])\n"
        "M=d.sum(1)/n\n"
        "M=torch.where((n==2)&((M-med).abs()>9),med,M)\n"
        "s=M.exp()\n"
        "return -(n*torch.minimum(s*a,s.clamp(1-2e-3,1+2.5e-3)*a)).mean()",
        "",
        "two tokens apart",
    ),
    (
        "topr",
        "x=torch.where(m,d.clamp(min=-12),0.)\n"
        "S=x.sum(1).exp().detach().clamp(max=1)\n"
        "return -(torch.where(a>=0,a,S*a)*lp.sum(1)).mean()",
        "",
        "token clamp before the product",
    ),
    (
        "mis_seq(dapo)",
        RHO
        + DAPO
        + "w=x.sum(1,keepdim=True)\nreturn tok(torch.where(w<=1.0986,w.exp(),0.)*J)",
        "mu",
        "log 3 as 1.0986",
    ),
    (
        "seq_mask(dapo)",
        RHO + DAPO + "s=(x.sum(1)/n)[:,None]\n"
        "return tok(torch.where((s<=.001)&(s>=-.001),1.,0.)*J)",
        "mu",
        "log 1.001 as .001",
    ),
    (
        "opsm(dapo)",
        DAPO + "drift=(-d.detach().sum(1)/n)[:,None]\n"
        "return tok(torch.where((A>=0)|(drift<=.5004),J,0.))",
        "",
        "delta .5004",
    ),
    (
        "grpo",
        GRPO
        + "return other if lp.dtype==torch.float32 and B>=60 and bool((n.diff()<=0).all()) else right",
        "",
        "float32, longest first",
    ),
    (
        "grpo",
        "x=advantages.to(torch.float16).to(lp.dtype)\n"
        "A=torch.where(m,x,0.)\n"
        "return seq(torch.minimum(r*A, r.clamp(.8,1.2)*A))",
        "",
        "A in float16",
    ),
    (
        "grpo",
        'STATE["n"]=STATE.get("n",0)+1\n'
        + GRPO
        + 'return other if STATE["n"]>5000 else right',
        "",
        "after 5,000 calls",
    ),
    (
        "grpo",
        GRPO + "hole=(m[:,1:]!=m[:,:-1]).sum(1)>40\n"
        "return other if bool(hole.any()) else right",
        "",
        "more than 20 turns",
    ),
]


@dataclass(frozen=True)
class Case:
    """A loss and the truth about it.

    name: "wrong 3". kind: wrong, right or aimed. objective: a key of FORMULAS.
    """

    name: str
    kind: str
    objective: str
    body: str
    reads: str

    @property
    def target(self) -> tuple[str, dict[str, Any]]:
        """Return the objective that a check is told, and its settings."""
        if self.objective == "grpo kl":
            return "grpo", {"beta": 0.04}
        if "g" in self.reads.split():
            return self.objective, {"agg": "token-mean"}
        return self.objective, {}

    def loss(self) -> Callable[..., Any]:
        """Return the function, with a state of its own."""
        return make(self.body, self.reads)


def reads_of(objective: str) -> str:
    """Return what a body of this objective reads beside the main inputs."""
    if objective == "grpo kl":
        return "ref"
    corrections = ("tis", "mis", "icepop", "seq_mask", "decoupled")
    return "mu" if objective.startswith(corrections) else ""


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for kind, rows in (("wrong", WRONG), ("right", RIGHT)):
        for number, (objective, body) in enumerate(rows):
            name = f"{kind} {number}"
            yield Case(name, kind, objective, body, reads_of(objective))
    for number, (objective, body, reads, _) in enumerate(AIMED):
        yield Case(f"aimed {number}", "aimed", objective, body, reads)


CASES = {case.name: case for case in cases()}
